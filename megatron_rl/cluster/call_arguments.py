"""How the arguments of a call travel to the ranks: not at all, inside each rank's message, or stored once for all."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import ray
from ray import ObjectRef, cloudpickle

Payload = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a method."""

INLINE_BYTES = 64 << 10
"""Up to this size arguments are pickled once and sent inside the messages; Ray would store larger ones per rank."""

Message = tuple[bytes | ObjectRef, ...]
"""Positional arguments of a rank's Ray method: none, pickled arguments, or where the arguments are stored."""


def pack(payload: Payload, has_records: bool) -> Message:
    """A message to send to every rank that gets this payload. Records are stored at once: pickling would copy them."""
    args, kwargs = payload
    if not args and not kwargs:
        return ()
    if not has_records:
        pickled = cloudpickle.dumps(payload)
        if len(pickled) <= INLINE_BYTES:
            return (pickled,)
    return (ray.put(payload),)


def unpack(message: Sequence[Any]) -> Payload:
    """What `pack` was given; on the rank, where Ray has put the stored payload in place of its reference."""
    if not message:
        return (), {}
    (content,) = message
    payload: Payload = pickle.loads(content) if isinstance(content, bytes) else content
    return payload
