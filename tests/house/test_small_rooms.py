"""The size and manners of the source: small files, small functions, honest names, one place for the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("megatron_rl", "third_party_patches", "scripts", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py"))

MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
KEYS = (
    "algorithm_keys",
    "distillation_keys",
    "judge_keys",
    "megatron",
    "reward_keys",
    "rollout_keys",
    "schema",
    "tasks",
    "trainer",
)
SCHEMAS = tuple(f"megatron_rl/config/{name}.py" for name in KEYS)
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "misc"}
READS_THE_ENVIRONMENT = (
    *("megatron_rl/cluster/", "megatron_rl/roles/environment.py", "megatron_rl/cli/"),
    "megatron_rl/agents/adapters/",  # files of other interpreters
)


def name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    """A file, which several tests read."""
    return ast.parse(path.read_text())


KINDS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.Attribute)


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """What the tests look at, wherever it stands in a file; the rest, most of a tree, is gone through once."""
    return tuple(node for node in ast.walk(parsed(path)) if isinstance(node, KINDS))


def functions(found: Iterable[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    docstring = first.end_lineno - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - docstring


def test_files_are_short():
    """Would not catch two subjects in one short file."""
    long = {name(path): count for path in SOURCES if (count := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long


def test_functions_are_short():
    """Would not catch a short function that does two things."""
    long = {
        f"{name(path)}:{function.lineno} {function.name}": count
        for path in SOURCES
        for function in functions(nodes(path))
        if (count := code_lines(function)) > MAX_FUNCTION_LINES
    }
    assert not long


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f():\n    return 1\n", 2),
        ('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n', 2),
        ("def f(\n    x,\n):\n    return x\n", 4),
    ],
)
def test_code_lines_leave_the_docstring_out(source, lines):
    """Counted by hand. Would not catch comments, which count as code."""
    assert code_lines(next(functions(ast.walk(ast.parse(source))))) == lines


def test_names_say_something():
    """Would not catch other names that say nothing."""
    assert not [name(path) for path in SOURCES if NAMES_THAT_SAY_NOTHING & {path.stem, path.parent.name}]


def test_no_bare_except():
    """Would not catch `except Exception` that swallows everything."""
    bare = [
        f"{name(path)}:{node.lineno}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare


def is_overload(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether it is one more signature, for type checkers, of a function that has its docstring elsewhere."""
    return any(isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in node.decorator_list)


def test_public_functions_and_modules_have_docstrings():
    """Would not catch a docstring that says nothing, nor a small method whose class explains it."""
    silent = []
    for path in SOURCES:
        if not name(path).startswith("megatron_rl/") or name(path) in SCHEMAS:
            continue  # the schema documents each field instead
        tree = parsed(path)
        if ast.get_docstring(tree) is None:
            silent.append(name(path))
        silent += [
            f"{name(path)}:{node.lineno} {node.name}"
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and not is_overload(node)
            and ast.get_docstring(node) is None
        ]
    assert not silent


SAME_SUBJECT = {"tasks"}
"""Module names in two rooms: the keys of a subject, and the code that reads them."""


def test_a_name_means_one_thing():
    """Classes and modules of the package. Would not catch a function or a variable with two meanings."""
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        if not name(path).startswith("megatron_rl/") or path.stem == "__init__" or path.parent.name == "adapters":
            continue  # each adapter is a file of another interpreter, with the class that a run's default names
        classes = [node.name for node in parsed(path).body if isinstance(node, ast.ClassDef)]
        for defined in [*classes, *({path.stem} - SAME_SUBJECT)]:
            places.setdefault(defined, []).append(name(path))
    assert not {defined: where for defined, where in places.items() if len(where) > 1}


def test_environment_is_read_in_few_places():
    """Would not catch a library that reads the environment for us."""
    readers = [
        f"{name(path)}:{node.lineno}"
        for path in SOURCES
        if name(path).startswith("megatron_rl/") and not name(path).startswith(READS_THE_ENVIRONMENT)
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    ]
    assert not readers


MAX_PUBLIC_METHODS, MAX_ATTRIBUTES = 15, 20


def public_methods(kind: ast.ClassDef) -> set[str]:
    """Names of methods and properties that do not begin with an underscore."""
    return {node.name for node in kind.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


def attributes(kind: ast.ClassDef) -> set[str]:
    """Names of fields, and of whatever a method assigns to `self`."""
    fields = {node.target.id for node in kind.body if isinstance(node, ast.AnnAssign)}
    assigned = {
        target.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        for target in [node]
        if isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    return fields | assigned


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in SOURCES:
        if name(path).startswith("megatron_rl/") and name(path) not in SCHEMAS:
            yield from (
                (f"{name(path)}:{node.lineno} {node.name}", node)
                for node in nodes(path)
                if isinstance(node, ast.ClassDef)
            )


def test_classes_have_few_methods_and_attributes():
    """Would not catch a class whose few attributes are bags."""
    methods = {
        where: len(found) for where, node in classes() if len(found := public_methods(node)) > MAX_PUBLIC_METHODS
    }
    kept = {where: len(found) for where, node in classes() if len(found := attributes(node)) > MAX_ATTRIBUTES}
    assert not methods and not kept


def test_the_counts_of_a_class():
    """By hand. Would not catch attributes that are set from outside, or inherited ones."""
    source = "class A:\n  x: int\n  def f(self):\n    self.y, self.z = 1, 2\n    b.w = 3\n  def _g(self): pass\n"
    (node,) = ast.parse(source).body
    assert public_methods(node) == {"f"} and attributes(node) == {"x", "y", "z"}
