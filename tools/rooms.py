"""The table of rooms, made from the code: every module with the first sentence of its docstring.

`python -m tools.rooms` writes `docs/rooms.md`; a test holds the page to the tree. Never says what no docstring says.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "rooms.md"
ROOMS = ("services", "kernels", "tools")
HEAD = """# Rooms

Every module, with the first sentence of its docstring. `python -m tools.rooms` writes this page from the code; change a
sentence there. [architecture.md](architecture.md) says how the rooms belong together.
"""
_END = re.compile(r"(?<=[.!?])\s")


def first_sentence(docstring: str) -> str:
    """Up to the first full stop that a blank follows, on one line, fit for a cell of a table."""
    text = " ".join(docstring.partition("\n\n")[0].split())
    return _END.split(text, maxsplit=1)[0].replace("|", "\\|")


def modules() -> dict[Path, list[Path]]:
    """Every folder with modules that say something, in order, and those modules."""
    found: dict[Path, list[Path]] = {}
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        if path.read_text().strip():
            found.setdefault(path.parent, []).append(path)
    return found


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for folder, paths in modules().items():
        parts.append(f"\n## {folder.relative_to(ROOT)}\n\n| module | what it is |\n|---|---|\n")
        for path in paths:
            says = ast.get_docstring(ast.parse(path.read_text())) or ""
            parts.append(f"| `{path.stem}` | {first_sentence(says)} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} is written\n")
