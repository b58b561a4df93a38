"""The shape of the tree as a test: sizes of files, functions and folders, and names that say nothing."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 70
MAX_FOLDER_MODULES = 16
ROOMS = ("services", "kernels", "tools")


def sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("path", sources(*ROOMS, "tests"), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES, "a file that needs sections is two files"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} at line {node.lineno} has {length} lines"


def test_no_folder_is_a_heap() -> None:
    """Small files that lie flat beside each other say nothing of what belongs together."""
    folders: dict[Path, int] = {}
    for path in sources(*ROOMS, "tests"):
        folders[path.parent] = folders.get(path.parent, 0) + (path.name != "__init__.py")
    assert {str(folder): count for folder, count in folders.items() if count > MAX_FOLDER_MODULES} == {}


@pytest.mark.parametrize("path", sources(*ROOMS), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text)), "a module's docstring says what it is and what it never does"


def test_no_room_is_named_after_nothing() -> None:
    assert not {"utils", "manager", "handler", "helpers", "misc"} & {path.stem for path in sources(*ROOMS)}
