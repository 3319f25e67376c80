"""What depends on a role's kind is in its row (`config.role_kinds`): no branch and no table elsewhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_rl.config.role_kinds import KINDS

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "megatron_rl"
TABLES = ("megatron_rl.config.roles", "megatron_rl.config.role_kinds")
OWN = (PACKAGE / "config" / "role_kinds.py", PACKAGE / "config" / "roles.py", PACKAGE / "roles")
"""The rows, and the classes of roles."""
MOST: dict[str, int] = {}
"""File -> branches that are left. They may only become fewer."""


def branches(source: str) -> list[int]:
    """Lines that compare with the name of a kind, or that list names of kinds: `==`, `in (A, B)`, {A: ...}, (A, B)."""
    tree = ast.parse(source)
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in TABLES
        for alias in node.names
        if alias.name.lower() in KINDS
    }

    def is_kind(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Name) and node.id in names

    def is_branch(node: ast.AST) -> bool:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                equals = any(isinstance(one, ast.Eq | ast.NotEq | ast.Is | ast.IsNot) for one in ops)
                return equals and any(map(is_kind, (left, *others)))
            case ast.Dict(keys=listed) | ast.Tuple(elts=listed) | ast.List(elts=listed) | ast.Set(elts=listed):
                return sum(map(is_kind, listed)) > 1
            case ast.MatchValue(value=value):
                return is_kind(value)
        return False

    return [node.lineno for node in ast.walk(tree) if is_branch(node)]  # type: ignore[attr-defined]


def test_no_other_module_branches_on_a_kind():
    """Would not catch a kind's name as a string, or a kind that is asked for by a property of its own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if not any(path.is_relative_to(own) for own in OWN) and (lines := branches(path.read_text())):
            found[str(path.relative_to(PACKAGE))] = lines
    more = {file: lines for file, lines in found.items() if len(lines) > MOST.get(file, 0)}
    assert not more
    assert {file: len(lines) for file, lines in found.items()} == MOST, "lower MOST to what is left"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("if role.name == ACTOR:\n  pass\n", 1),
        ("if ROLE != role.kind.name:\n  pass\n", 1),
        ("if role.kind.name in (ACTOR, ROLE):\n  pass\n", 1),
        ("TABLE = {ACTOR: 1, ROLE: 2}\n", 1),
        ("match name:\n  case x.y:\n    pass\nif ACTOR in block:\n  pass\nroles[ACTOR]\n", 0),
    ],
)
def test_branches_are_counted(text: str, count: int):
    """By hand. Would not catch a name that is imported with its module."""
    given = "from megatron_rl.config.roles import ACTOR, CRITIC as ROLE, roles_of\n"
    assert len(branches(given + text)) == count
