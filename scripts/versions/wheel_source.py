"""The Python source in a wheel, asked by dotted path and never imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MOST_HOPS = 12
"""Imports and base classes that are followed."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Found:
    """Where a name is: its module, the definition where the name is a function's or class's, else None."""

    module: str
    definition: Definition | None = None


class WheelSource:
    """Modules, names and signatures. Read by AST: what a module computes at import is not seen."""

    def __init__(self, wheel: Path, packages: Sequence[str] = ()) -> None:
        """wheel: the file; or a folder with these packages in it, as they are installed."""
        self._files: zipfile.Path | Path = wheel if wheel.is_dir() else zipfile.Path(wheel)
        if wheel.is_dir():
            every = (file for package in packages for file in (wheel / package).rglob("*.py*"))
            files = [file for file in every if file.suffix in (".py", ".pyi")]
            names = [file.relative_to(wheel).as_posix() for file in files]
        else:
            names = zipfile.ZipFile(wheel).namelist()
        self._names = set(names)
        self._folders = {name[:end] for name in names for end, character in enumerate(name) if character == "/"}

    @cache  # noqa: B019  (one wheel a run)
    def module(self, name: str) -> ast.Module | None:
        """The parsed source of a module or package, of a compiled one its stub; None if there is none."""
        place = name.replace(".", "/")
        for path in (f"{place}.py", f"{place}/__init__.py", f"{place}.pyi", f"{place}/__init__.pyi"):
            if path in self._names:
                return ast.parse((self._files / path).read_text(encoding="utf-8"))
        return None

    @cache  # noqa: B019
    def find(self, path: str, hops: int = MOST_HOPS) -> Found | None:
        """A module, a name in one, or what is below a class, by its dotted path."""
        if self.module(path) is not None or self._is_folder(path):
            return Found(path)
        owner, _, name = path.rpartition(".")
        if not owner or hops == 0:
            return None
        if self.module(owner) is not None:
            return self._in_module(owner, name, hops)
        above = self.find(owner, hops - 1)
        if above is None or not isinstance(above.definition, ast.ClassDef):
            return None
        return self._in_class(above, name, hops - 1)

    def takes(self, found: Found, hops: int = MOST_HOPS) -> tuple[dict[str, str], bool]:
        """(Its arguments -> the text of their default, empty without, whether it takes any other).

        Of a class those of its construction.
        """
        node = found.definition
        if isinstance(node, ast.ClassDef):
            return self._construction(found, node, hops)
        if node is None:
            return {}, True
        for decorator in node.decorator_list:
            match decorator:
                case ast.Call(func=ast.Name(id="copy_signature"), args=[ast.Name(id=original), *_]):
                    other = self.find(f"{found.module}.{original}", hops - 1)
                    return self.takes(other, hops - 1) if other is not None else ({}, False)
        if "overload" not in map(ast.unparse, node.decorator_list):
            return with_defaults(node), node.args.kwarg is not None
        tree, every = self.module(found.module), dict[str, str]()
        for one in at_top(tree) if tree is not None else ():
            if isinstance(one, ast.FunctionDef) and one.name == node.name:
                every |= with_defaults(one)
        return every, False

    def _is_folder(self, path: str) -> bool:
        return path.replace(".", "/") in self._folders

    def _in_module(self, module: str, name: str, hops: int) -> Found | None:
        tree = self.module(module)
        assert tree is not None
        for node in at_top(tree):
            if isinstance(node, Definition) and node.name == name:
                return Found(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        source = absolute(node, module, self._is_folder(module))
                        other = self.find(f"{source}.{name if alias.name == '*' else alias.name}", hops - 1)
                        if other is not None:
                            return other
                        if alias.name != "*":
                            return Found(module)  # of another library, or compiled
            imported = [one.asname or one.name for one in node.names] if isinstance(node, ast.Import) else []
            if name in {one.partition(".")[0] for one in imported}:
                return Found(module)
            if name in assigned_names(node):
                return Found(module)
        return Found(module) if is_lazy(tree, name) else None

    def _in_class(self, owner: Found, name: str, hops: int) -> Found | None:
        node = owner.definition
        assert isinstance(node, ast.ClassDef)
        for inner in node.body:
            if isinstance(inner, Definition) and inner.name == name:
                return Found(owner.module, inner)
            if name in assigned_names(inner):
                return Found(owner.module)
        if name in set_on_self(node):
            return Found(owner.module)
        for base in self._bases(owner, node, hops):
            found = self._in_class(base, name, hops - 1)
            if found is not None:
                return found
        return None

    def _construction(self, found: Found, node: ast.ClassDef, hops: int) -> tuple[dict[str, str], bool]:
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and inner.name in ("__init__", "__new__"):
                return self.takes(Found(found.module, inner), hops - 1)
        fields = [inner for inner in node.body if isinstance(inner, ast.AnnAssign)]
        names, is_open = {ast.unparse(one.target): ast.unparse(one.value) if one.value else "" for one in fields}, False
        for base in self._bases(found, node, hops):
            assert isinstance(base.definition, ast.ClassDef)
            others, other_open = self._construction(base, base.definition, hops - 1)
            names, is_open = others | names, is_open or other_open
        return names, is_open

    def _bases(self, owner: Found, node: ast.ClassDef, hops: int) -> Iterator[Found]:
        for base in [*node.bases, *(one.value for one in node.keywords if one.arg == "metaclass")]:
            name = ast.unparse(base)
            found = self.find(f"{owner.module}.{name}", hops - 1) if hops > 0 else None
            if found is not None and isinstance(found.definition, ast.ClassDef):
                yield found


def with_defaults(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> dict[str, str]:
    """Arguments of a function -> the text of their default, empty without; not those behind stars."""
    by_place = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(by_place) - len(node.args.defaults)) + list(node.args.defaults)
    every = zip([*by_place, *node.args.kwonlyargs], [*defaults, *node.args.kw_defaults], strict=True)
    return {one.arg: "" if default is None else ast.unparse(default) for one, default in every}


def at_top(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of a module that are not inside a function or class, also in `if`, `try` and `with`."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            waiting += [inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)]
            waiting += [inner for handler in getattr(node, "handlers", []) for inner in handler.body]


def assigned_names(node: ast.stmt) -> set[str]:
    """Names that a statement assigns."""
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if isinstance(node, ast.Assign):
        return {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return set()


def set_on_self(node: ast.ClassDef) -> set[str]:
    """Attributes of `self` that the methods of a class set."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }


def is_lazy(tree: ast.Module, name: str) -> bool:
    """Whether a module has names of its own way of looking them up, and this is one of them."""
    if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        return False
    return any(isinstance(node, ast.Constant) and node.value == name for node in ast.walk(tree))


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module that a `from` names, also relatively."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    above = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*above, *([node.module] if node.module else [])])
