"""The shape of the tree as a test: sizes of files, functions and rooms, and words that have no place in it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 70
MAX_CORE_LINES = 2_000
MAX_TREE_LINES = 15_000
ROOMS = ("services", "kernels", "tools")


def sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


@pytest.mark.parametrize("path", sources(*ROOMS, "tests"), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES, "a file that needs sections is two files"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} at line {node.lineno} has {length} lines"


def test_rooms_are_small() -> None:
    assert lines(sources("services/core")) <= MAX_CORE_LINES
    native = list((ROOT / "kernels" / "native").glob("*.[ch]"))
    assert lines(sources(*ROOMS)) + lines(native) <= MAX_TREE_LINES


@pytest.mark.parametrize("path", sources(*ROOMS), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text)), "a module's docstring says what it is and what it never does"


def test_no_room_is_named_after_nothing() -> None:
    assert not {"utils", "manager", "handler", "helpers", "misc"} & {path.stem for path in sources(*ROOMS)}
