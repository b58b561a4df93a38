"""The shape of the tree as a test: sizes of files, functions and folders, and names that say nothing."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 70
MAX_FOLDER_MODULES = 16
ROOMS = ("services", "kernels", "tools")


def sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_are_small() -> None:
    """A file that needs sections is two files."""
    lengths = {named(path): len(path.read_text().splitlines()) for path in sources(*ROOMS, "tests")}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_are_small() -> None:
    lengths = {
        f"{named(path)}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in sources(*ROOMS, "tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_no_folder_is_a_heap() -> None:
    """Small files that lie flat beside each other say nothing of what belongs together."""
    folders: dict[Path, int] = {}
    for path in sources(*ROOMS, "tests"):
        folders[path.parent] = folders.get(path.parent, 0) + (path.name != "__init__.py")
    assert {named(folder): count for folder, count in folders.items() if count > MAX_FOLDER_MODULES} == {}


def test_every_module_says_what_it_is() -> None:
    """A module's docstring says what it is and what it never does."""
    texts = {named(path): path.read_text() for path in sources(*ROOMS)}
    assert [name for name, text in texts.items() if text and not ast.get_docstring(ast.parse(text))] == []


def test_no_room_is_named_after_nothing() -> None:
    assert not {"utils", "manager", "handler", "helpers", "misc"} & {path.stem for path in sources(*ROOMS)}
