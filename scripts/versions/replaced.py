"""Functions that patches replace: what stands in for them, and what theirs are in other versions."""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from versions.relied_on import LIBRARIES, REPOSITORY, path_of, read_patch
from versions.wheel_source import Found, WheelSource, with_defaults

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
NEUTRAL = {"", "None", "False", "0", "0.0", "()", "''", "field(default_factory=dict)", "field(default_factory=list)"}
"""Defaults of new arguments that leave everything as it was before there was the argument."""


@dataclass(frozen=True)
class Replaced:
    """A function or method of a library, by its dotted path; the file that replaces it, and our function there."""

    path: str
    user: str
    ours: Function | None
    tree: ast.Module
    builds: tuple[str, ...] = ()
    not_needed: str = ""

    @property
    def distributions(self) -> tuple[str, ...]:
        """Builds of the library to which the patch is applied."""
        builds = LIBRARIES[self.path.partition(".")[0]]
        return tuple(one for one in builds if one in self.builds) or builds


def all_replaced() -> Iterator[Replaced]:
    """Those of every patch."""
    for file in sorted((REPOSITORY / "third_party_patches").rglob("*.py")):
        yield from read_replaced(ast.parse(file.read_text()), file.relative_to(REPOSITORY).as_posix())


def read_replaced(tree: ast.Module, user: str) -> Iterator[Replaced]:
    """Those of one file, also through names that it gives to modules and classes."""
    not_needed, builds = read_patch(tree)
    known = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    pairs = [pair for node in ast.walk(tree) for pair in assigned(node)]
    for target, value in pairs:
        if isinstance(target, ast.Name) and (path := path_behind(value, known, constants)) is not None:
            known.setdefault(target.id, path)
    for target, value in pairs:
        if not isinstance(target, ast.Name) and (path := path_behind(target, known, constants)) is not None:
            yield Replaced(path, user, stands_in(value, tree), tree, builds, not_needed)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(Target, value) of an assignment, of each part of one to several."""
    match node:
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                match target, value:
                    case ast.Tuple(elts=left), ast.Tuple(elts=right) if len(left) == len(right):
                        yield from zip(left, right, strict=True)
                    case _:
                        yield target, value
        case ast.Call(func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str() as name), value]):
            yield ast.Attribute(owner, name, ast.Store()), value


def path_behind(node: ast.expr, known: dict[str, str], constants: Mapping[str, object]) -> str | None:
    """`path_of`, also of `vars(x)["name"]` and of a module by its name."""
    match node:
        case ast.Subscript(
            value=ast.Call(func=ast.Name(id="vars"), args=[owner]), slice=ast.Constant(value=str() as name)
        ):
            path = path_behind(owner, known, constants)
            return None if path is None else f"{path}.{name}"
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Name(id=name)]):
            return str(constants[name]) if name in constants else None
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str() as name)]):
            return name
        case ast.Attribute(value=value, attr=name):
            path = path_behind(value, known, constants)
            return None if path is None else f"{path}.{name}"
    return path_of(node, known)


def stands_in(value: ast.expr, tree: ast.Module) -> Function | None:
    """The function of ours behind a value; None where it is none, or a call makes it in a way that is not seen."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    match value:
        case ast.Lambda():
            return value
        case ast.Name(id=name):
            return functions.get(name)
        case ast.Call(func=ast.Name(id="staticmethod" | "classmethod"), args=[inner]):
            return stands_in(inner, tree)
        case ast.Call(func=ast.Name(id=name)) if name in functions:
            made = [node.value for node in ast.walk(functions[name]) if isinstance(node, ast.Return)]
            own = {inner.name for inner in functions[name].body if isinstance(inner, ast.FunctionDef)}
            found = [one for one in made if isinstance(one, ast.Name) and one.id in own]
            return functions[found[0].id] if found else None
    return None


def lines_of(node: ast.AST) -> list[str]:
    """Its source without comments and docstrings, in one form."""
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node).splitlines()


def changed_lines(before: ast.AST, after: ast.AST) -> int:
    """How many lines were removed or added."""
    compared = difflib.ndiff(lines_of(before), lines_of(after))
    return sum(line[:2] in ("- ", "+ ") for line in compared)


def num_returned(function: Function, tree: ast.Module | None) -> set[int]:
    """Lengths of the tuples that it returns, where they are written down; also of a function of its module."""
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)} if tree is not None else {}
    lengths, waiting = set[int](), list[ast.AST]([function.body] if isinstance(function, ast.Lambda) else function.body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Return(value=ast.IfExp(body=one, orelse=other)):
                waiting += [ast.Return(one), ast.Return(other)]
                continue
            case ast.Return(value=ast.Tuple(elts=parts)):
                sizes = [size_of(part) for part in parts]
                if None not in sizes:
                    lengths.add(sum(size or 0 for size in sizes))
            case ast.Return(value=ast.Call(func=ast.Name(id=name))) if name in functions and tree is not None:
                if functions[name] is not function:
                    lengths |= num_returned(functions[name], None)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return lengths


def size_of(part: ast.expr) -> int | None:
    """How many values a part of a tuple is: `*[None] * 6` is six."""
    match part:
        case ast.Starred(
            value=ast.BinOp(left=ast.List(elts=parts), op=ast.Mult(), right=ast.Constant(value=int() as n))
        ):
            return len(parts) * n
        case ast.Starred():
            return None
    return 1


def arity_problems(replaced: Replaced, found: Found, wheel: WheelSource) -> list[str]:
    """What ours does not take, or returns in another number than theirs, as far as the source says so."""
    theirs, ours = found.definition, replaced.ours
    if ours is None or theirs is None or isinstance(theirs, ast.ClassDef):
        return []
    taken, mine = list(with_defaults(theirs)), list(with_defaults(ours))
    more = [name for place, name in enumerate(taken) if place >= len(mine) and name not in mine]
    is_open = ours.args.vararg is not None or ours.args.kwarg is not None
    said = [f"also takes {', '.join(more)}, which ours does not"] if more and not is_open else []
    wanted, what = num_returned(theirs, wheel.module(found.module)), "returns {} values"
    if (gradients := num_gradients(replaced, wheel)) is not None:
        wanted, what = {gradients}, "must return {} gradients"
    returned = num_returned(ours, replaced.tree)
    if wanted and returned - wanted:
        counts = (" or ".join(map(str, sorted(some))) for some in (wanted, returned))
        said.append(f"{what.format(next(counts))}, ours {next(counts)}")
    return said


def num_gradients(replaced: Replaced, wheel: WheelSource) -> int | None:
    """How many gradients the `backward` of an autograd function returns: one for each argument of its `forward`."""
    owner, _, name = replaced.path.rpartition(".")
    kind = wheel.find(owner) if name == "backward" else None
    if kind is None or not isinstance(kind.definition, ast.ClassDef):
        return None
    forward = wheel.find(f"{owner}.forward")
    if forward is None or not isinstance(forward.definition, ast.FunctionDef):
        return None
    has_context = wheel.find(f"{owner}.setup_context") is None
    return None if forward.definition.args.vararg else len(with_defaults(forward.definition)) - has_context


def changed_text(path: str, wheel: WheelSource, proven: Sequence[WheelSource]) -> int:
    """Lines in which a function differs from the nearest of the proven versions; 0 where one has the same, or none."""
    found = wheel.find(path)
    known = [one.find(path) for one in proven]
    before = [one.definition for one in known if one is not None and one.definition is not None]
    if found is None or found.definition is None or not before:
        return 0
    return min(changed_lines(one, found.definition) for one in before)


def new_choices(path: str, passed: frozenset[str], wheel: WheelSource, proven: Sequence[WheelSource]) -> list[str]:
    """Defaults that a call leaves to the library and that no proven version has: `name=default`.

    Of a class only those that it had otherwise: what a new field of a configuration does is the library's business.
    """
    found = wheel.find(path)
    places = [(one, place) for one in proven if (place := one.find(path)) is not None]
    known = [one.takes(place)[0] for one, place in places if place.definition is not None]
    if found is None or found.definition is None or not known:
        return []
    is_class, choices = isinstance(found.definition, ast.ClassDef), []
    for name, default in wheel.takes(found)[0].items():
        is_same = any(before[name] == default if name in before else is_class or default in NEUTRAL for before in known)
        if name not in passed and default and not is_same:
            choices.append(f"{name}={default}")
    return choices
