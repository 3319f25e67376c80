"""The one place that knows CPU from CUDA: device, collective backend, memory in use."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention import activate_flash_attention_impl

HOPPER = 9
"""Major number of its compute capability; FlashAttention 3 is written for it."""


def rng_states() -> list[torch.Tensor]:
    """States of torch's generators: the CPU's, then this rank's GPU's where CUDA is in use; others are not touched."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def set_rng_states(states: list[torch.Tensor]) -> None:
    """Put back what `rng_states` returned in this process."""
    cpu, *cuda = states
    torch.set_rng_state(cpu)
    for state in cuda:
        torch.cuda.set_rng_state(state)


def has_varlen_attention(tensor: torch.Tensor) -> bool:
    """Whether torch has a variable-length attention kernel for this tensor's device and dtype."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def choose_flash_attention(kind: str) -> str | None:
    """Let torch's flash attention be FlashAttention 3 where that is installed and the GPU is a Hopper; once a process.

    Returns its name, or None where torch's own stays. kind: "cpu" or "cuda".
    """
    is_hopper = kind == "cuda" and torch.cuda.get_device_capability()[0] == HOPPER
    if not is_hopper or importlib.util.find_spec("flash_attn_interface") is None:
        return None
    activate_flash_attention_impl("FA3")
    return "FA3"


def has_grouped_attention(tensor: torch.Tensor) -> bool:
    """Whether attention over whole rows takes fewer heads of keys than of queries without writing out all scores.

    torch's flash kernels do, which CUDA has for half precision; its memory-efficient kernel takes equal numbers alone.
    """
    return not tensor.is_cuda or has_varlen_attention(tensor)


def has_fused_norm(tensor: torch.Tensor) -> bool:
    """Whether torch's RMS norm of this tensor is one kernel, in backward too; on the CPU it is a dozen operations."""
    return tensor.device.type != "cpu"


def shares_prompts(device: torch.device) -> bool:
    """Whether packed rows may share the tokens of a prompt.

    On CUDA they may not, because the variable-length kernel reads the keys of each segment end to end.
    """
    return device.type == "cpu"


def has_grouped_mm(tensor: torch.Tensor) -> bool:
    """Whether torch has a grouped matrix product for this tensor's device and dtype. Rows must be a multiple of
    16 bytes.
    """
    if tensor.dtype != torch.bfloat16:
        return False
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished the work of this thread's stream; nothing to do on CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def settled_seconds(device: torch.device) -> float:
    """Seconds of a monotonic clock, after the device has finished the work of this thread's stream.

    CUDA kernels and collectives run after their calls return; waiting at both ends of a phase times its own work.
    """
    synchronize(device)
    return time.perf_counter()


def in_one_copy(parts: Sequence[Mapping[str, torch.Tensor]], device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of the CPU on the device, part by part under their names; on the CPU those that are given.

    They are in one buffer, for whose single transfer the host does not wait. It stays as long as one of them.
    """
    if device.type == "cpu":
        return [dict(part) for part in parts]
    flat = [tensor for part in parts for tensor in part.values()]
    ends = list(accumulate(-(-tensor.nbytes // LARGEST_ELEMENT) * LARGEST_ELEMENT for tensor in flat))
    buffer = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, pin_memory=device.type == "cuda")
    starts = [0, *ends][: len(flat)]
    for tensor, start in zip(flat, starts, strict=True):
        _view_of(buffer, start, tensor).copy_(tensor)
    there = buffer.to(device, non_blocking=True)
    moved = iter([_view_of(there, start, tensor) for tensor, start in zip(flat, starts, strict=True)])
    return [{name: next(moved) for name in part} for part in parts]


LARGEST_ELEMENT = 16
"""Bytes; an offset in a buffer is a multiple of it, so that a view of any dtype may begin there."""


def _view_of(buffer: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def release_cached(device: torch.device) -> None:
    """Release cached memory that no tensor uses, so that other allocators can take it; nothing to do on CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def keep_current_stream(device: torch.device) -> None:
    """Set this thread's current stream again; nothing to do on CPU.

    vLLM records the streams that are set. If none was set, it moves the thread to a new stream for good.
    """
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.current_stream(device))


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which another thread works on a stream of its own; on the CPU it does nothing.

    The stream begins after the work that the caller's stream has so far. The thread must end with `synchronize`.
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


class GivenBack:
    """Bytes that torch counts as allocated although their owners have released the memory under them."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int]] = {}
        self._least: dict[int, int] = {}

    def note(self, owner: int, index: int, num_bytes: int) -> None:
        """`owner`, a unique number, has released `num_bytes` of the GPU `index`; 0: it has allocated them again."""
        if num_bytes:
            self._sizes[owner] = index, num_bytes
        else:
            self._sizes.pop(owner, None)
        self._least[index] = min(self.least(index), self._now(index))

    def begin(self, index: int) -> None:
        """Start a new measurement of `least`."""
        self._least[index] = self._now(index)

    def least(self, index: int) -> int:
        """The least number of released bytes of the GPU `index` since `begin`."""
        return self._least.get(index, 0)

    def _now(self, index: int) -> int:
        return sum(num_bytes for there, num_bytes in self._sizes.values() if there == index)


GIVEN_BACK = GivenBack()
"""The released bytes of this process."""


@dataclass(frozen=True)
class Device:
    """The compute device of a rank: `kind` is "cpu" or "cuda", `local_rank` the index among its node's GPUs."""

    kind: str
    local_rank: int = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind, self.local_rank) if self.kind == "cuda" else torch.device("cpu")

    @property
    def backend(self) -> str:
        """Collective backend spec for `init_process_group`: CPU tensors always travel over gloo."""
        return "cpu:gloo,cuda:nccl" if self.kind == "cuda" else "gloo"

    @property
    def backends(self) -> dict[str, str]:
        """Kind of a tensor's device -> name of the collective backend that moves it."""
        return {"cpu": "gloo"} | ({"cuda": "nccl"} if self.kind == "cuda" else {})

    @property
    def batched_p2p(self) -> bool:
        """Whether pipeline sends and receives are posted as one batch; gloo has no batched form."""
        return self.kind == "cuda"

    def activate(self) -> None:
        """Make this the calling process's default CUDA device; nothing to do on CPU."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.local_rank)

    def reset_peak_memory(self) -> None:
        """Start a new measurement of `peak_memory_bytes`; nothing to do on CPU."""
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.local_rank)
            GIVEN_BACK.begin(self.local_rank)

    def peak_memory_bytes(self) -> int | None:
        """Peak allocated bytes since `reset_peak_memory`; None on CPU.

        Memory with fixed addresses that was allocated for a part of that time counts for all of it.
        """
        if self.kind != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.local_rank) - GIVEN_BACK.least(self.local_rank)
