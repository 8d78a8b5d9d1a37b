"""The direction of imports: read from the source of every module, and seen in what a light start really loads."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "trio")
TEST_TOOLS = ("tests", "libp2p", "multiaddr", "google", "transformers", "peft")

# What each package must not import, anywhere: as a module, or inside a function.
FORBIDDEN = {
    "engine": ("app", "p2p", "ui", "trio", "textual", *TEST_TOOLS),
    "p2p": ("app", "engine", "ui", "torch", "textual", *TEST_TOOLS),
    "ui": ("engine", "p2p", "torch", "trio", *TEST_TOOLS),
    "app": TEST_TOOLS,
}
# `ui` knows the API's client, the values that it speaks of, and nothing else of the application.
UI_MAY_USE = ("app.api.client", "app.snapshot", "app.core.errors", "app.core.terminal_text")
# Of the application, only the command line starts the dashboard.
MAY_USE_UI = "app.cli"

# The level of each room: a room imports rooms of a lower level only, and two rooms of one level know nothing of each
# other. `docs/architecture.md` says what each room is for.
LEVELS = {
    1: ("app.core",),
    2: ("app.config", "app.manifest", "app.session", "app.snapshot"),
    3: ("app.courtesy", "app.serving", "app.swarm"),
    4: ("app.membership", "app.routing", "app.system"),
    5: ("app.planning", "app.weights"),
    6: ("app.asker", "app.hosting", "app.joining"),
    7: ("app.training",),
    8: ("app.rounds",),
    9: ("app.api",),
    10: ("app.node", "app.web"),
    11: ("app.cli",),
}
P2P_LEVELS = {
    1: ("p2p",),  # the modules beside the rooms
    2: ("p2p.channel", "p2p.link"),
    3: ("p2p.host",),
    4: ("p2p.dht", "p2p.discovery", "p2p.memory", "p2p.nat"),
    5: ("p2p.network",),
}
ENGINE_LEVELS = {
    1: (
        "engine.budget",
        "engine.config",
        "engine.device.kinds",
        "engine.errors",
        "engine.int4_changes",
        "engine.int8_rows",
        "engine.pieces",
        "engine.wire",
    ),
    2: ("engine.device", "engine.sources"),
    3: ("engine.model", "engine.text"),
    4: ("engine.training",),
    5: ("engine",),  # the modules beside the rooms
}
UI_LEVELS = {
    1: ("ui.state",),
    2: ("ui.draw",),
    3: ("ui.node_app", "ui.widgets"),
    4: ("ui.screens",),
    5: ("ui",),
}
LEVEL_OF = {
    room: level
    for table in (LEVELS, P2P_LEVELS, ENGINE_LEVELS, UI_LEVELS)
    for level, rooms in table.items()
    for room in rooms
}


def room_of(module: str) -> str | None:
    """The longest listed name that a module lies in; a package itself is in none."""
    parts = module.split(".")
    return next((room for n in range(len(parts), 0, -1) if (room := ".".join(parts[:n])) in LEVEL_OF), None)


def climbs(module: str, imported: str) -> bool:
    """True where an import leads to a room of the same or a higher level within one package.

    The base modules of a package, its level 1, may know each other.
    """
    here, there = room_of(module), room_of(imported)
    if here is None or there is None or here == there or module.split(".")[0] != imported.split(".")[0]:
        return False
    return LEVEL_OF[there] >= max(LEVEL_OF[here], 2)


def modules_of(package: str) -> Iterator[tuple[str, Path]]:
    """Every module of a package with its dotted name."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def imports_in(source: str, module: str, *, is_package: bool = False) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of every import, those inside functions and of strings to `import_module` included."""
    return tuple(_imports_in(source, module, is_package))


def _imports_in(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                keep = module.split(".")
                keep = keep[: len(keep) - node.level + int(is_package)]
                base = ".".join([*keep, base]) if base else ".".join(keep)
            # `from app import node` imports app.node, so the names count too.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def breaches(package: str, module: str, imported: str) -> bool:
    """Whether this import goes against the arrows."""

    def within(name: str, whole: str) -> bool:
        return name == whole or name.startswith(whole + ".")

    if any(within(imported, forbidden) for forbidden in FORBIDDEN[package]):
        return True
    if package == "ui" and within(imported, "app"):
        return not any(within(imported, allowed) for allowed in UI_MAY_USE)
    return package == "app" and within(imported, "ui") and not within(module, MAY_USE_UI)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_follow_the_arrows(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for module, path in modules_of(package)
        for line, imported in imports_in(path.read_text("utf-8"), module, is_package=path.name == "__init__.py")
        if breaches(package, module, imported)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("package", "module", "source", "wrong"),
    [
        ("engine", "engine.model.block", "def f():\n    import trio", True),
        ("engine", "engine.model.block", "from app import session", True),
        ("engine", "engine.model.block", "import torch", False),
        ("p2p", "p2p.network", "from torch import nn", True),
        ("p2p", "p2p.network", "import importlib\nimportlib.import_module('engine.model.block')", True),
        ("p2p", "p2p.network", "import torchaudio_is_another_package", False),
        ("ui", "ui.screens.chat", "from app.api.client import Client", False),
        ("ui", "ui.screens.chat", "from app.api import client", False),
        ("ui", "ui.screens.chat", "from app.node.node import Node", True),
        ("ui", "ui.screens.chat", "from ..theme import colours", False),
        ("ui", "ui.screens.chat", "from ...app import node", True),
        ("app", "app.node.node", "import ui", True),
        ("app", "app.cli.dashboard", "from ui.app import Dashboard", False),
    ],
)
def test_a_breach_is_seen(package: str, module: str, source: str, wrong: bool) -> None:
    assert any(breaches(package, module, imported) for _, imported in imports_in(source, module)) is wrong


@pytest.mark.parametrize("package", FORBIDDEN)
def test_rooms_import_only_rooms_of_a_lower_level(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for module, path in modules_of(package)
        for line, imported in imports_in(path.read_text("utf-8"), module, is_package=path.name == "__init__.py")
        if climbs(module, imported)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "imported", "wrong"),
    [
        ("app.routing.search", "app.core.span.Span", False),
        ("app.routing.search", "app.routing.route.Route", False),
        ("app.routing.search", "app.asker.asker.Asker", True),
        ("app.routing.search", "app.membership.table.Table", True),
        ("app.core.errors", "app.config.home", True),
        ("app.cli.serve", "app.node.node", False),
        ("app.node.node", "app.cli.serve", True),
        ("app.node.node", "p2p.network.LibP2PNetwork", False),
        ("p2p.link.link", "p2p.errors", False),
        ("p2p.errors", "p2p.link.link", True),
        ("p2p.host.host", "p2p.network", True),
        ("engine.model.block", "engine.hosting", True),
        ("engine.hosting", "engine.model.block", False),
        ("engine.sources.gguf", "engine.budget", False),
        ("ui.widgets.panel", "ui.screens.chat", True),
        ("ui.app", "ui.screens.chat", False),
    ],
)
def test_a_climb_is_seen(module: str, imported: str, wrong: bool) -> None:
    assert climbs(module, imported) is wrong


def test_every_room_has_a_level_and_says_what_it_is_for() -> None:
    for package in FORBIDDEN:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            room = ".".join(init.parent.relative_to(ROOT).parts)
            assert ast.get_docstring(ast.parse(init.read_text("utf-8"))), f"{room} has no docstring"
            assert room in LEVEL_OF or room == "app", f"{room} has no level"


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for imported in graph[module]:
            if imported not in order:
                visit(imported)
            if imported in stack:
                lowest[module] = min(lowest[module], lowest[imported])
        if lowest[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1 or module in graph[module]:
                found.append(sorted(group))

    for module in graph:
        if module not in order:
            visit(module)
    return found


def import_graph() -> dict[str, set[str]]:
    """Which module imports which, imports for type checkers and inside functions included."""
    paths = dict(pair for package in FORBIDDEN for pair in modules_of(package))
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        found = imports_in(path.read_text("utf-8"), module, is_package=path.name == "__init__.py")
        names = {name if name in paths else name.rpartition(".")[0] for _, name in found}
        graph[module] = (names & paths.keys()) - {module}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(import_graph()) == []


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def loaded_by(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after running `code`."""
    report = f"\nimport sys\nprint('loaded', *(set({HEAVY!r}) & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(answer.stdout.splitlines()[-1].split()[1:])


LIGHT_STARTS = {
    "the dashboard": "\n".join(f"import {module}" for module, _ in modules_of("ui") if not module.endswith("__main__")),
    "shoal --help": "import app.cli, contextlib\nwith contextlib.suppress(SystemExit): app.cli.main(['--help'])",
    "shoal alone": "import app.cli.dashboard, ui.app, ui.screens.overview",
    "the API's client": "import app.api.client",
    "a failure": "from app.cli.failures import explain; explain(OSError(28, 'full'))",
}


@pytest.mark.parametrize("start", LIGHT_STARTS)
def test_a_light_start_stays_light(start: str) -> None:
    assert loaded_by(LIGHT_STARTS[start]) == set()


def test_what_is_loaded_is_seen() -> None:
    assert loaded_by("import trio") == {"trio"}


def test_packaging_does_not_shadow_the_library_of_that_name() -> None:
    assert not (ROOT / "packaging" / "__init__.py").exists()


def test_the_generated_docs_are_current() -> None:
    command = [sys.executable, "packaging/docs.py", "--check"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_module_that_asks_for_the_system_is_named_in_the_docs() -> None:
    page = (ROOT / "docs" / "platforms.md").read_text("utf-8")
    asks = re.compile(r"sys\.platform|os\.name\b|platform\.system\(")
    asking = [
        path.relative_to(ROOT).as_posix()
        for package in FORBIDDEN
        for _, path in modules_of(package)
        if asks.search(path.read_text("utf-8"))
    ]
    assert "p2p/platform.py" in asking
    assert [path for path in asking if f"`{path}`" not in page] == []


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text("utf-8")
        assert page.name != "README.md" or 6_000 <= len(text.encode()) <= 8_192
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
