"""Each line of the tables of docs/scale/security.md has a test, which docs/internals/security_tests.md names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/scale/security.md"
TESTS = REPOSITORY / "docs/internals/security_tests.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """Heading -> the cells of every line of the table below it, without head and rule."""
    tables = re.findall(r"^## (.*)\n(?:(?!## ).*\n)*?((?:^\|.*\|\n)+)", page, re.MULTILINE)
    return {
        heading: [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
        for heading, table in tables
    }


def names_of_tests(file: Path) -> set[str]:
    """Names of a file's tests."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_line_has_a_test() -> None:
    """Both pages have the same lines under the same headings; each names one test, in a file that has it. Would not
    catch a test that shows something else than its line says.
    """
    shown, tested = tables_of(PAGE.read_text()), tables_of(TESTS.read_text())
    lines = {heading: [line[0] for line in table] for heading, table in shown.items()}
    assert lines == {heading: [line[0] for line in table] for heading, table in tested.items()}
    assert len(lines) == 4 and sum(map(len, lines.values())) >= 25
    for cell in [line[-1] for table in tested.values() for line in table]:
        named = TEST.fullmatch(cell)
        assert named is not None, cell
        assert (REPOSITORY / named[1]).is_file() and named[2] in names_of_tests(REPOSITORY / named[1]), cell


def test_cells_by_hand() -> None:
    """Would not catch a bar inside of a cell."""
    page = "## A\n\ntext\n\n| a | test |\n|---|---|\n| x | `t` |\n| y | no |\n\n## B\n\n## C\n| z |\n|---|\n| w |\n"
    assert tables_of(page) == {"A": [["x", "`t`"], ["y", "no"]], "C": [["w"]]}
