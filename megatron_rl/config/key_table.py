"""Every configuration key with its type, default and text, as the generated reference prints them. No torch."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.config.constraints import Constraints
from megatron_rl.config.keys import ELEMENT_GROUPS, INTERPOLATION, declared_defaults, fields_of
from megatron_rl.config.schema import MISSING, RunConfig
from megatron_rl.errors import shown

OUR_KEY, VERLS_KEY = "ours", "verl"
USERS_NAME = "NAME"
"""Stands for the name that the user gives to an element of `pools`, `reward_models` and so on."""

TYPE_NAMES = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null"}


@dataclass(frozen=True)
class DocumentedKey:
    """One row of the table."""

    key: str
    """Dotted name, with NAME for a name of the user's."""
    type: str
    """What the value may be, with its bounds or choices."""
    default: str
    """As it is written in YAML; `as KEY`: the value of another key; "": the key must be set."""
    whose: str
    """"verl": the key has verl's name and meaning; "ours": verl has no such key."""
    text: str
    """What it does, in one paragraph."""
    same_as: str
    """The first key in the table that is the same key of another role; "" for that first one."""


@cache
def key_table() -> tuple[DocumentedKey, ...]:
    """Return every key in the order of the schema. Raises KeyError for one without a text."""
    first: dict[tuple[type, str], str] = {}
    rows = []
    for key, owner, leaf in _leaves(RunConfig, "", False):
        name, default = key.rpartition(".")[2], declared_defaults()[key.replace(f".{USERS_NAME}.", ".*.")]
        text = texts_of(owner)[name]
        same_as = first.setdefault((owner, name), key)
        rows.append(
            DocumentedKey(
                key,
                type_text(leaf),
                _default_text(default),
                OUR_KEY if leaf.is_ours else VERLS_KEY,
                text,
                "" if same_as == key else same_as,
            )
        )
    return tuple(rows)


def _leaves(group: type, prefix: str, is_ours: bool) -> Iterator[tuple[str, type, Constraints]]:
    """Yield (key, class that declares it, its constraints) of a group and of the groups below it."""
    for name, leaf in fields_of(group).items():
        key, whose = prefix + name, leaf.is_ours or is_ours
        below = ELEMENT_GROUPS.get(key)
        if below is not None:
            yield from _leaves(below, f"{key}.{USERS_NAME}.", whose)
        elif isinstance(leaf.kind, type) and hasattr(leaf.kind, "__dataclass_fields__"):
            yield from _leaves(leaf.kind, f"{key}.", whose)
        else:
            yield key, _declaring(group, name), Constraints(**{**vars(leaf), "is_ours": whose})


def _declaring(group: type, name: str) -> type:
    """Return the class of a field's annotation: the group, or the nearest of its bases that has it."""
    return next(base for base in group.__mro__ if name in vars(base).get("__annotations__", {}))


def type_text(leaf: Constraints) -> str:
    """Return what a value may be, as words."""
    kinds = typing.get_args(leaf.kind) if isinstance(leaf.kind, types.UnionType) else [leaf.kind]
    words = [_type_word(kind, leaf) for kind in kinds]
    if leaf.choices is not None:
        words[0] = (
            f"list of {' | '.join(leaf.choices)}" if typing.get_origin(leaf.kind) is list else " | ".join(leaf.choices)
        )
    if leaf.other is not None and leaf.other.value is not None:
        words.append(f"{shown(leaf.other.value)} ({leaf.other.meaning})")
    return " or ".join(words)


def _type_word(kind: Any, leaf: Constraints) -> str:
    if kind in (int, float) and leaf.bounds is not None:
        return f"{TYPE_NAMES[kind]} {leaf.bounds}".rstrip()
    if kind in (str, Any) and leaf.is_path:
        return "path" if kind is str else "path or list of paths"
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        return "mapping"
    if origin in (list, tuple):
        return f"list of {TYPE_NAMES[inner[0]]}s".replace("texts", "text")
    return TYPE_NAMES.get(kind, "number or text")


def _default_text(default: Any) -> str:
    if default == MISSING:
        return ""
    leader = INTERPOLATION.fullmatch(default) if isinstance(default, str) else None
    if leader is not None:
        return f"as {leader[1]}"
    return str(list(default)) if isinstance(default, tuple) else shown(default)


@cache
def texts_of(owner: type) -> dict[str, str]:
    """Return the text under each field of a class, as one paragraph; fields without one are left out."""
    (tree,) = (
        node
        for node in ast.parse(Path(inspect.getfile(owner)).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__
    )
    texts = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            texts[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts
