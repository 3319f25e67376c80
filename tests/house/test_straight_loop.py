"""The loop is straight: what a step does is decided when a run is opened, not while it goes on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOM = REPOSITORY / "megatron_rl"
STEP = (
    *("train.py", "scoring/batch_scorers.py", "scoring/sampled_batch.py"),
    *(f"controller/{name}.py" for name in ("algorithm", "lifecycle", "pretraining", "run", "run_logger")),
    *(f"controller/{name}.py" for name in ("run_scorers", "validation")),
)
"""The loop, and what runs a step on the controller."""
MOST = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: str) -> list[Function]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function)]


def conditionals(function: Function) -> int:
    """`if` and `elif`, `a if b else c`, the `if` of a comprehension, each `case` but the first."""
    count = 0
    for node in ast.walk(function):
        count += isinstance(node, ast.If | ast.IfExp)
        count += len(node.ifs) if isinstance(node, ast.comprehension) else 0
        count += len(node.cases) - 1 if isinstance(node, ast.Match) else 0
    return count


def test_functions_of_the_loop_have_few_conditionals():
    """Would not catch `and`, `or`, and a condition that hides behind a call."""
    many = {
        f"{name}:{function.lineno} {function.name}": count
        for name in STEP
        for function in functions((ROOM / name).read_text())
        if (count := conditionals(function)) > MOST
    }
    assert not many


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f():\n  if a:\n    pass\n  elif b:\n    pass\n  else:\n    pass\n", 2),
        ("def f():\n  return [x if y else z for x in w if x if z]\n", 3),
        ("def f():\n  match a:\n    case 1:\n      pass\n    case 2:\n      pass\n", 1),
        ("def f():\n  while a and b:\n    pass\n", 0),
    ],
)
def test_conditionals_are_counted(source: str, count: int):
    """By hand. Would not catch a lambda, whose conditionals count for the function around it."""
    assert conditionals(functions(source)[0]) == count
