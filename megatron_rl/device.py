"""The one place that knows CPU from CUDA: device, collective backend, memory in use."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


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
    """Whether torch has a kernel that attends within segments of any length, for this tensor's device and type."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def has_fused_norm(tensor: torch.Tensor) -> bool:
    """Whether torch's RMS norm of this tensor is one kernel, backward too; on the CPU it is a dozen operations."""
    return tensor.device.type != "cpu"


def shares_prompts(device: torch.device) -> bool:
    """Whether rows that lie end to end may have the tokens of a prompt in common.

    On CUDA they may not: the kernel for segments of any length reads each one's keys end to end.
    """
    return device.type == "cpu"


def has_grouped_mm(tensor: torch.Tensor) -> bool:
    """Whether torch multiplies groups of rows by a matrix each in one call, for this tensor's device and type.

    Rows must be a multiple of 16 bytes.
    """
    if tensor.dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that this thread's stream was given; the CPU has."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def settled_seconds(device: torch.device) -> float:
    """A steady clock, read when the device has done all that this thread's stream was given.

    Read at the edges of a phase, it gives the phase its own work: collectives and kernels on CUDA only begin when they
    are called.
    """
    synchronize(device)
    return time.perf_counter()


def release_cached(device: torch.device) -> None:
    """Give memory that no tensor uses back to the GPU, for whoever needs it next; on the CPU it is not kept."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def keep_current_stream(device: torch.device) -> None:
    """Say once more which stream is this thread's; nothing to do on CPU.

    vLLM notes the streams that are set, and where none was it moves the thread to a new one, for good.
    """
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.current_stream(device))


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """What a thread must enter to work on the device beside the one that calls this; on the CPU there is nothing to do.

    It begins after what the caller's stream was given so far. The thread must end with `synchronize`.
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


class GivenBack:
    """Bytes that torch counts as handed out although their memory was given back under it, by their owners."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int]] = {}
        self._least: dict[int, int] = {}

    def note(self, owner: int, index: int, num_bytes: int) -> None:
        """`owner` (any number of its own) has given so many bytes of the GPU `index` back; 0: it has them all."""
        if num_bytes:
            self._sizes[owner] = index, num_bytes
        else:
            self._sizes.pop(owner, None)
        self._least[index] = min(self.least(index), self._now(index))

    def begin(self, index: int) -> None:
        """Begin a new measurement of `least`."""
        self._least[index] = self._now(index)

    def least(self, index: int) -> int:
        """What was away of the GPU `index` at every moment since `begin`."""
        return self._least.get(index, 0)

    def _now(self, index: int) -> int:
        return sum(num_bytes for there, num_bytes in self._sizes.values() if there == index)


GIVEN_BACK = GivenBack()
"""This process's."""


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
        """Begin a new measurement of `peak_memory_bytes`; nothing to do on CPU."""
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.local_rank)
            GIVEN_BACK.begin(self.local_rank)

    def peak_memory_bytes(self) -> int | None:
        """Most bytes that tensors had on the GPU since `reset_peak_memory`; None on CPU, where nobody counts.

        Where memory that keeps its addresses has come or gone meanwhile, it counts as there all the time.
        """
        if self.kind != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.local_rank) - GIVEN_BACK.least(self.local_rank)
