"""The pages that the code holds: the table of rooms, the glossary, and the files that the pages name."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tools.rooms import PAGE, ROOT, modules, page

GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
ROW = re.compile(r"^\| ([^|`]+) \| [^|]+ \| `([^`]+)` `(\w+)` \|$", re.MULTILINE)
FORBIDDEN = frozenset({"Asked", "Dealt", "Guardian", "Lane", "Leg", "Lifeline", "Mint", "Rig", "Tournament"})
"""Names of classes that once meant several things, or nothing."""
A_FILE = re.compile(r"`((?:services|kernels|tools|tests|protos|deploy|docs|\.ci)/[\w./-]+\.(?:py|c|h|md|toml|proto))`")


@cache
def names_of(path: Path) -> frozenset[str]:
    """Everything that a module defines at its top level."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            case _:
                pass
    return frozenset(found)


def test_the_table_of_rooms_is_the_trees() -> None:
    assert page() == PAGE.read_text(), "python -m tools.rooms writes it anew"


def test_each_word_stands_once_with_the_file_that_defines_it() -> None:
    rows = ROW.findall(GLOSSARY.read_text())
    assert len(rows) == sum(line.startswith("| ") for line in GLOSSARY.read_text().splitlines()) - 1
    words = [word for word, _, _ in rows]
    assert len(set(words)) == len(words) > 30
    wrong = [(file, name) for _, file, name in rows if not (ROOT / file).exists() or name not in names_of(ROOT / file)]
    assert wrong == []


def test_no_class_has_an_old_name() -> None:
    defined = {name for paths in modules().values() for path in paths for name in names_of(path)}
    assert len(defined) > 500
    assert defined & FORBIDDEN == set()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(path: Path) -> None:
    named = set(A_FILE.findall(path.read_text()))
    assert {name for name in named if not (ROOT / name).exists()} == set()
