"""Flat memory whose bytes come and go while every view of it stays bound."""

from __future__ import annotations

import math

import torch

from megatron_rl.hybrid_engine.stable_memory import take


class MemoryBuffer:
    """A flat tensor of `numel` elements that can give its memory back and take it again.

    Views are made once; after `release()` and `allocate()` the same views (a rollout engine's parameters, say) see the
    new memory, whose content is undefined until it is written. Its address stays: on a CPU always, on CUDA where the
    buffer has a `tag`, which names it among vLLM's allocations and asks for a vLLM that is built for CUDA.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, tag: str | None = None) -> None:
        self.data, self._memory = take(numel, dtype, device, tag)
        self.num_bytes = self._memory.num_bytes

    def view(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The elements from `offset` on, in `shape`. The buffer must be allocated."""
        return self.data[offset : offset + math.prod(shape)].view(shape)

    @property
    def is_allocated(self) -> bool:
        return self._memory.is_allocated

    def allocate(self) -> None:
        """Take memory again; nothing happens when it is there."""
        self._memory.allocate()

    def release(self) -> None:
        """Give the memory back. Views must not be read or written until `allocate()` (`stable_memory.py`)."""
        self._memory.release()
