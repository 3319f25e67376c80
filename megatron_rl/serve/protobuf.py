"""Protocol Buffers' wire format, as far as the Tinker API's messages need it: bodies of passes, and their replies.

A message is a dict by the names of its fields. Fields that a table does not have are passed over, as the format asks.
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

INT, BYTES, TEXT, DOUBLE = "int", "bytes", "text", "double"
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MOST_BYTES = 10
"""The longest number, which has 64 bits."""


@dataclass(frozen=True)
class Field:
    """One field. kind: INT, BYTES, TEXT, DOUBLE, or the table of a message. is_list: it may come several times. is_map:
    a message of `key` (text) and `value`.
    """

    name: str
    kind: str | Mapping[int, Field]
    is_list: bool = False
    is_map: bool = False


Table = Mapping[int, Field]
"""Number of a field -> the field."""


def map_of(name: str, kind: str | Table) -> Field:
    """A map from text."""
    return Field(name, {1: Field("key", TEXT), 2: Field("value", kind)}, is_map=True)


def decoded(content: bytes, table: Table) -> dict[str, Any]:
    """Read a message: lists and maps exist even where they are empty, other fields only where they were sent.

    Raises ValueError for what is no message of this table.
    """
    message: dict[str, Any] = {
        field.name: {} if field.is_map else [] for field in table.values() if field.is_map or field.is_list
    }
    for number, wire, value in _fields(memoryview(content)):
        field = table.get(number)
        if field is None:
            continue
        if field.is_map:
            assert isinstance(field.kind, Mapping)
            entry = decoded(bytes(_of_length(field, wire, value)), field.kind)
            message[field.name][entry.get("key", "")] = entry.get("value", _empty(field.kind[2]))
        elif field.is_list and field.kind == INT and wire == _LENGTH:
            message[field.name] += _packed(value)
        elif field.is_list:
            message[field.name].append(_value(field, wire, value))
        else:
            message[field.name] = _value(field, wire, value)
    return message


def _empty(field: Field) -> Any:
    if isinstance(field.kind, Mapping):
        return decoded(b"", field.kind)
    return {INT: 0, BYTES: b"", TEXT: "", DOUBLE: 0.0}[field.kind]


def _fields(content: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield (number, wire type, value): an int, or the bytes."""
    place = 0
    while place < len(content):
        tag, place = _varint(content, place)
        number, wire = tag >> 3, tag & 7
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire, 0)
        if wire == _VARINT:
            value, place = _varint(content, place)
            yield number, wire, value
            continue
        if wire == _LENGTH:
            size, place = _varint(content, place)
        elif not size:
            raise ValueError(f"field {number} has wire type {wire}")
        if place + size > len(content):
            raise ValueError(f"field {number} has {size} bytes, and {len(content) - place} are left")
        yield number, wire, content[place : place + size]
        place += size


def _varint(content: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for count in range(_MOST_BYTES):
        if place + count >= len(content):
            raise ValueError("it ends inside of a number")
        byte = content[place + count]
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value & (1 << 64) - 1, place + count + 1
    raise ValueError(f"a number has more than {_MOST_BYTES} bytes")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _packed(content: memoryview) -> list[int]:
    values, place = [], 0
    while place < len(content):
        value, place = _varint(content, place)
        values.append(_signed(value))
    return values


def _of_length(field: Field, wire: int, value: Any) -> memoryview:
    if wire != _LENGTH:
        raise ValueError(f"{field.name} has wire type {wire}")
    part: memoryview = value
    return part


def _value(field: Field, wire: int, value: Any) -> Any:
    if field.kind == INT:
        if wire != _VARINT:
            raise ValueError(f"{field.name} has wire type {wire}")
        return _signed(value)
    if field.kind == DOUBLE:
        if wire != _FIXED64:
            raise ValueError(f"{field.name} has wire type {wire}")
        return struct.unpack("<d", value)[0]
    content = bytes(_of_length(field, wire, value))
    if isinstance(field.kind, Mapping):
        return decoded(content, field.kind)
    return content.decode() if field.kind == TEXT else content


def encoded(message: Mapping[str, Any], table: Table) -> bytes:
    """Write a message; fields that it does not have, or whose value is None, are left out."""
    parts = []
    for number, field in table.items():
        value = message.get(field.name)
        if value is None:
            continue
        if field.is_map:
            assert isinstance(field.kind, Mapping)
            entries = (encoded({"key": key, "value": one}, field.kind) for key, one in value.items())
            parts += [_with_length(number, entry) for entry in entries]
        else:
            parts += [_encoded_value(number, field, one) for one in (value if field.is_list else [value])]
    return b"".join(parts)


def _encoded_value(number: int, field: Field, value: Any) -> bytes:
    if field.kind == INT:
        return _number(number << 3 | _VARINT) + _number(value & (1 << 64) - 1)
    if field.kind == DOUBLE:
        return _number(number << 3 | _FIXED64) + struct.pack("<d", value)
    if isinstance(field.kind, Mapping):
        return _with_length(number, encoded(value, field.kind))
    return _with_length(number, value.encode() if field.kind == TEXT else value)


def _with_length(number: int, content: bytes) -> bytes:
    return _number(number << 3 | _LENGTH) + _number(len(content)) + content


def _number(value: int) -> bytes:
    content = bytearray()
    while value >= 0x80:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)
