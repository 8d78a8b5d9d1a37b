"""Writes the tree of README.md, one line a file, from the first sentence of each module's docstring.

make tree
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("app", "engine", "p2p", "ui", "packaging", "tests")
BEGIN, END = "<!-- tree: `make tree` writes this -->\n```\n", "```\n<!-- end of the tree -->\n"
_LINE_CHARACTERS = 118
_NAME_CHARACTERS = 30


def main() -> int:
    """Replace the tree in README.md."""
    readme = ROOT / "README.md"
    text = readme.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(before + BEGIN + tree(ROOT) + END + after, "utf-8")
    return 0


def tree(root: Path) -> str:
    """The folders and their modules, as text."""
    lines = []
    for folder in FOLDERS:
        lines += _folder_lines(root / folder, 0)
    return "".join(line + "\n" for line in lines)


def _folder_lines(folder: Path, depth: int) -> list[str]:
    package = folder / "__init__.py"
    lines = [_line(folder.name + "/", depth, summary(package) if package.exists() else "")]
    entries = sorted(folder.iterdir(), key=lambda entry: (entry.is_dir(), entry.name))
    for entry in entries:
        if entry.is_dir() and any(entry.rglob("*.py")):
            lines += _folder_lines(entry, depth + 1)
        elif entry.suffix == ".py" and entry.name != "__init__.py":
            lines.append(_line(entry.name, depth + 1, summary(entry)))
    return lines


def summary(module: Path) -> str:
    """The first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(module.read_text("utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    # A sentence ends where a space and a capital or a name in backquotes follow, or the text ends.
    return re.split(r"\.(?=\s+[A-Z`]|$)", paragraph, maxsplit=1)[0]


def _line(name: str, depth: int, text: str) -> str:
    line = f"{'  ' * depth + name:<{_NAME_CHARACTERS}} {text}".rstrip()
    if len(line) <= _LINE_CHARACTERS:
        return line
    # Too long: end it where a clause ends, rather than in the middle of one.
    clauses = list(re.finditer(r"[:;,](?=\s)", line[:_LINE_CHARACTERS]))
    return line[: clauses[-1].start()] if clauses else line[: _LINE_CHARACTERS - 1].rsplit(" ", 1)[0] + " …"


if __name__ == "__main__":
    sys.exit(main())
