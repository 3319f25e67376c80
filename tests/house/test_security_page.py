"""Each line of the tables of docs/scale/security.md names a test that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/scale/security.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def lines_of(page: str) -> list[list[str]]:
    """The cells of every line of every table, without heads and rules."""
    tables = [block.splitlines()[2:] for block in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for table in tables for line in table]


def names_of_tests(file: Path) -> set[str]:
    """Names of a file's tests."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_line_has_a_test() -> None:
    """Four tables of three columns; the last names one test, in a file that has it. Would not catch a test that shows
    something else than its line says.
    """
    page = PAGE.read_text()
    found = lines_of(page)
    assert page.count("| test |\n") == 4 and len(found) >= 25 and {len(line) for line in found} == {3}
    for *_, cell in found:
        named = TEST.fullmatch(cell)
        assert named is not None, cell
        assert (REPOSITORY / named[1]).is_file() and named[2] in names_of_tests(REPOSITORY / named[1]), cell


def test_cells_by_hand() -> None:
    """Would not catch a bar inside of a cell."""
    page = (
        "text\n\n| a | test |\n|---|---|\n| x | `tests/a/test_b.py::test_c` |\n| y | nothing |\n\n| z |\n|---|\n| w |\n"
    )
    assert lines_of(page) == [["x", "`tests/a/test_b.py::test_c`"], ["y", "nothing"], ["w"]]
