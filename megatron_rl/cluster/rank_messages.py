"""Messages between a client and a rank's process: bytes over a pipe, whatever started the process.

    to the rank     (method of `RankWorker`, its arguments)
    to the client   (None, answer) or (RankFailure, None)

A rank answers messages in their order, one answer for each.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import torch

from megatron_rl.cluster.failures import RankFailure

Payload = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a method."""


class RankFailed(Exception):
    """A rank has answered with its failure."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailed, (self.failure,)


class ProcessDied(Exception):
    """A rank's process is gone, so it will not answer; the text says how it ended, as far as is known."""


class _Pickler(cloudpickle.Pickler):
    """Writes plain CPU tensors as arrays: torch would write each into an archive, which takes five times as long."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            values = obj.detach().contiguous().view(-1).view(torch.uint8).numpy()
            return _tensor, (values, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def dumps(content: object) -> bytes:
    """Pickle a message, with functions and classes that the receiver cannot import by value."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    return stream.getvalue()


def answer_of(reply: bytes) -> Any:
    """Return the answer in a reply. Raises RankFailed."""
    failure, answer = pickle.loads(reply)
    if failure is not None:
        raise RankFailed(failure)
    return answer


def _is_plain(tensor: torch.Tensor) -> bool:
    is_stored = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() > 0
    return is_stored and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _tensor(values: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(values).view(dtype).view(shape)
