"""Writes the pages of docs/ that follow from the code, and the list of packages in README.md.

    make docs              write them
    python packaging/docs.py --check    exit with 1 if one of them is not current

cli.md comes from the command line's own parser, configuration.md from the settings, troubleshooting.md from the
reasons, protocols.md and files.md from docstrings, api.md from the routes.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PACKAGES = ("app", "p2p", "engine", "ui")
BEGIN, END = "<!-- `make docs` writes what follows -->\n", "<!-- end of what `make docs` writes -->\n"
API_PREFIXES = {
    "routes.py": "/control",
    "openai.py": "/v1",
    "tokens.py": "",
    "anthropic.py": "/v1/messages",
    "responses.py": "/v1/responses",
    "ollama.py": "/api",
}
GENERATED = "<!-- Written by `make docs`; edit the code that it names instead. -->\n\n"
# The modules whose docstring specifies something that other programs read or write.
WIRES = (
    ("p2p/__init__.py", "The link between two peers"),
    ("p2p/envelope.py", "Signed statements"),
    ("app/membership/wire.py", "Membership"),
    ("app/session/frame.py", "Frames of sessions and training"),
    ("app/session/wire.py", "Sessions"),
    ("app/session/cache_wire.py", "Hand-overs of a session's cache"),
    ("app/training/wire.py", "Training"),
    ("app/rounds/wire.py", "Rounds between islands"),
    ("app/rounds/statements.py", "Statements of a round"),
    ("app/rounds/log.py", "The log of a training job"),
    ("app/rounds/record.py", "Records of training jobs"),
    ("app/weights/wire.py", "Parts of a model"),
    ("p2p/dht/wire.py", "The directory"),
    ("p2p/nat/relay_wire.py", "Relays"),
    ("app/swarm/invite.py", "Invites"),
    ("app/swarm/certificates.py", "Limited invites: tokens, certificates, revocation"),
    ("app/swarm/records.py", "Swarm records and announcements"),
    ("app/manifest/manifest.py", "Model manifests"),
    ("app/planning/machines.py", "Files of machines for `shoal plan`"),
    ("app/system/releases.py", "The list of releases"),
)


def main() -> int:
    """Write every generated page, or check that all are current."""
    check = "--check" in sys.argv[1:]
    stale = []
    for path, text in pages():
        if path.exists() and path.read_text("utf-8") == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
    if check and stale:
        print(f"not current: {', '.join(stale)}; run `make docs`")
    return int(check and bool(stale))


def pages() -> Iterator[tuple[Path, str]]:
    """Each generated page and what it should hold."""
    makers: dict[str, Callable[[], str]] = {
        "cli": cli_page,
        "configuration": configuration_page,
        "troubleshooting": troubleshooting_page,
        "protocols": protocols_page,
        "files": files_page,
    }
    for name, make in makers.items():
        yield ROOT / "docs" / f"{name}.md", GENERATED + make()
    for path, section in ((ROOT / "README.md", packages_list()), (ROOT / "docs" / "api.md", routes_table())):
        before, _, rest = path.read_text("utf-8").partition(BEGIN)
        yield path, before + BEGIN + section + END + rest.partition(END)[2]


# --- from the code ---------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command with its options, from the parser itself."""
    from app.cli import build_parser
    from app.cli.registry import all_commands

    parser = build_parser(all_commands())
    text = "# Commands\n\nEvery command takes `--home DIR` (or `SHOAL_HOME`), and `--json` where it prints facts. "
    text += "Exit status: 0 on success, 1 on failure with one line on stderr that says what to do, 2 on bad usage, "
    text += "3 if it is not done yet and the node keeps trying (`shoal join`). "
    text += re.sub(r"(\w+=1)", r"`\1`", parser.epilog or "") + "\n\n"
    text += "`shoal` alone starts the dashboard, and a node if none runs; without a terminal it is `shoal serve`. "
    text += "`shoal --node URL` shows a node on another machine.\n"
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in all_commands():
        text += f"\n## `shoal {command.name}`\n\n{sentence(command.help)}\n\n"
        text += "".join(_option_lines(subparsers.choices[command.name]))
    return text


def _option_lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                helps = {choice.dest: choice.help for choice in action._choices_actions}
                yield f"- `{name}`: {sentence(helps.get(name) or '')}\n"
                yield from (f"  {line}" for line in _option_lines(inner))
        elif action.dest not in ("help", "home", "json") and action.help != argparse.SUPPRESS:
            name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            metavar = f" {action.metavar or action.dest.upper()}" if action.option_strings and action.nargs != 0 else ""
            text = " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""
            yield f"- `{name}{metavar}`: {text}\n"


def configuration_page() -> str:
    """Every setting with its default, from the table of settings."""
    from app.config.settings import SETTINGS

    text = "# Settings\n\n`shoal config set NAME VALUE` changes one and checks it, `shoal config list` shows all; they "
    text += "live in `config.toml` of the home folder. `SHOAL_NAME` in the environment overrides the file. A setting "
    text += "marked *live* takes effect in a running node at once, the others at the next start.\n\n"
    text += "`--home FOLDER` or `SHOAL_HOME` names another home folder, for a second node. Models are in a cache that "
    text += "all homes of a user share; `SHOAL_CACHE` names another one.\n\n"
    text += "| setting | default | live | meaning |\n|---|---|---|---|\n"
    for setting in SETTINGS.values():
        default = setting.default
        shown = ", ".join(default) if isinstance(default, tuple) else "" if default is None else str(default).lower()
        text += f"| `{setting.name}` | {f'`{shown}`' if shown else 'none'} | {'yes' if setting.live else ''} "
        text += f"| {_cell(setting.help)} |\n"
    return text


def troubleshooting_page() -> str:
    """Every reason code and its next step."""
    from app.core.reasons import NEXT_STEPS

    text = "# Reasons and next steps\n\nWherever Shoal says why something is as it is, the API adds a stable code. "
    text += "This is what to do about each. `shoal doctor` checks the machine, the network and every peer; `shoal "
    text += "doctor --bundle FILE` packs a bug report without secrets.\n\n| code | next step |\n|---|---|\n"
    return text + "".join(f"| `{code}` | {_cell(step)} |\n" for code, step in NEXT_STEPS.items())


def protocols_page() -> str:
    """The index of wire formats: each is specified in the docstring of the module that speaks it."""
    text = "# Protocols and formats\n\nEach is specified beside the code that speaks it, in the module's docstring.\n\n"
    text += "| what | specified in | in short |\n|---|---|---|\n"
    for path, title in WIRES:
        text += f"| {title} | [`{path}`](../{path}) | {_cell(summary(ROOT / path))} |\n"
    return text


def files_page() -> str:
    """Every file and the first sentence of its docstring."""
    lines = ["# Files\n\n```\n"]
    for folder in (*PACKAGES, "packaging", "tests"):
        lines += [line + "\n" for line in _folder_lines(ROOT / folder, 0)]
    return "".join(lines) + "```\n"


def routes_table() -> str:
    """Every route of the API, from the modules that declare them."""
    rows = []
    for module, prefix in API_PREFIXES.items():
        for node in ast.walk(ast.parse((ROOT / "app" / "api" / module).read_text("utf-8"))):
            if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                does = first_sentence(ast.get_docstring(node)) or node.name.replace("_", " ")
                rows += [(path, f"| `{method} {path}` | {_cell(does)} |\n") for method, path in _routes(node, prefix)]
    return "| route | does |\n|---|---|\n" + "".join(row for _, row in sorted(rows))


def _routes(function: ast.AsyncFunctionDef | ast.FunctionDef, prefix: str) -> Iterator[tuple[str, str]]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute) and decorator.args:
            method, path = decorator.func.attr.upper(), decorator.args[0]
            is_nested = isinstance(decorator.func.value, ast.Name) and decorator.func.value.id == "router"
            if method in ("GET", "POST", "PUT", "DELETE") and isinstance(path, ast.Constant):
                yield method, (prefix if is_nested else "") + str(path.value)


def packages_list() -> str:
    """One line for each package and each room in it."""
    lines = []
    for package in PACKAGES:
        lines.append(f"- **`{package}/`** {sentence(summary(ROOT / package / '__init__.py'))}\n")
        for init in sorted((ROOT / package).glob("*/__init__.py")):
            lines.append(f"  - `{init.parent.name}/` {sentence(summary(init))}\n")
    return "".join(lines)


# --- helpers of the above --------------------------------------------------------------------------------------------


def summary(module: Path) -> str:
    """The first sentence of a module's docstring."""
    return first_sentence(ast.get_docstring(ast.parse(module.read_text("utf-8"))))


def first_sentence(docstring: str | None) -> str:
    """A docstring up to its first full stop that ends a sentence."""
    paragraph = " ".join((docstring or "").split("\n\n")[0].split())
    # A sentence ends where a space and a capital or a name in backquotes follow, or the text ends.
    return re.split(r"\.(?=\s+[A-Z`]|$)", paragraph, maxsplit=1)[0]


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    text = " ".join(text.split()).replace("%%", "%")
    return text if not text else text[0].upper() + text[1:].rstrip(".") + "."


def _cell(text: str) -> str:
    return sentence(text).replace("|", "\\|")


def _folder_lines(folder: Path, depth: int) -> Iterator[str]:
    package = folder / "__init__.py"
    yield _line(folder.name + "/", depth, summary(package) if package.exists() else "")
    for entry in sorted(folder.iterdir(), key=lambda entry: (entry.is_dir(), entry.name)):
        if entry.is_dir() and entry.name != "build" and any(entry.rglob("*.py")):
            yield from _folder_lines(entry, depth + 1)
        elif entry.suffix == ".py" and entry.name != "__init__.py":
            yield _line(entry.name, depth + 1, summary(entry))


def _line(name: str, depth: int, text: str) -> str:
    return f"{'  ' * depth + name:<32} {text}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
