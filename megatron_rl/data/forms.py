"""What a column holds, from a value or from its type in parquet.

Forms: text | texts | messages | conversations (lists of messages) | turns (ShareGPT's from and value) | number |
numbers | boolean | struct | null | other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow

LISTS = {"text": "texts", "messages": "conversations", "number": "numbers"}


def form_of_value(value: Any) -> str:
    """The form of a value of a row; of a list, that of its first element that is not null."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, dict):
        return "struct"
    if not isinstance(value, list):
        return "other"
    first = next((one for one in value if one is not None), None)
    if isinstance(first, dict):
        return form_of_fields(set(first))
    return LISTS.get(form_of_value(first), "other")


def form_of_fields(names: set[str]) -> str:
    """The form of a list of structs with these fields."""
    if names & {"role", "content"}:
        return "messages"
    return "turns" if {"from", "value"} <= names else "other"


def form_of_type(name: str, kind: pyarrow.DataType) -> Iterator[tuple[str, str]]:
    """(column, form) of a column of parquet, then of the fields of a struct, as column.field."""
    yield name, _form(kind)
    if pyarrow.types.is_struct(kind):
        for field in kind:
            yield from form_of_type(f"{name}.{field.name}", field.type)


def _form(kind: pyarrow.DataType) -> str:
    types = pyarrow.types
    if types.is_dictionary(kind):
        return _form(kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_null(kind):
        return "null"
    if types.is_struct(kind):
        return "struct"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if types.is_struct(kind.value_type):
            return form_of_fields({field.name for field in kind.value_type})
        return LISTS.get(_form(kind.value_type), "other")
    return "other"
