"""Send the arguments of a call to the ranks: inside each rank's message, or stored once for all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import ray
from ray import ObjectRef, cloudpickle

Payload = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a method."""

INLINE_BYTES = 64 << 10
"""Arguments up to this size are pickled once and sent inside the messages; Ray would store larger ones per rank."""

Message = tuple[bytes | ObjectRef, ...]
"""Positional arguments of a rank's Ray method: none, the pickled arguments, or a reference to the stored arguments."""


def pack(payload: Payload, has_records: bool) -> Message:
    """Return the message for every rank that gets this payload. Records are stored: pickling would copy them."""
    args, kwargs = payload
    if not args and not kwargs:
        return ()
    if not has_records:
        pickled = cloudpickle.dumps(payload)
        if len(pickled) <= INLINE_BYTES:
            return (pickled,)
    return (ray.put(payload),)


def unpack(message: Sequence[Any]) -> Payload:
    """Return the payload of `pack` on the rank, where Ray has replaced a reference by the stored payload."""
    if not message:
        return (), {}
    (content,) = message
    payload: Payload = pickle.loads(content) if isinstance(content, bytes) else content
    return payload
