"""The shape of the tree as a test: sizes of files, functions and rooms, and names that say nothing.

Lines of code are counted without docstrings, comments and blank lines, which the house style asks for.
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 70
MAX_CORE_LINES = 2_000
MAX_SERVING_LINES = 20_280
MAX_TOOLS_LINES = 4_000
MAX_NATIVE_LINES = 4_000
ROOMS = ("services", "kernels", "tools")
NO_CODE = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.COMMENT,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def code_lines(path: Path) -> int:
    text = path.read_text()
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


def native_lines(path: Path) -> int:
    return sum(bool(line.strip()) and not line.lstrip().startswith("//") for line in path.read_text().splitlines())


@pytest.mark.parametrize("path", sources(*ROOMS, "tests"), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES, "a file that needs sections is two files"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} at line {node.lineno} has {length} lines"


def test_rooms_are_small() -> None:
    assert sum(map(code_lines, sources("services/core"))) <= MAX_CORE_LINES
    assert sum(map(code_lines, sources("services", "kernels"))) <= MAX_SERVING_LINES
    assert sum(map(code_lines, sources("tools"))) <= MAX_TOOLS_LINES
    assert sum(map(native_lines, (ROOT / "kernels" / "native").glob("*.[ch]"))) <= MAX_NATIVE_LINES


@pytest.mark.parametrize("path", sources(*ROOMS), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text)), "a module's docstring says what it is and what it never does"


def test_no_room_is_named_after_nothing() -> None:
    assert not {"utils", "manager", "handler", "helpers", "misc"} & {path.stem for path in sources(*ROOMS)}
