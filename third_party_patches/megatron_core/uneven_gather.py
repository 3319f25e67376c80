"""Gather pieces of different lengths over gloo.

Reason: with expert and expert tensor parallelism together, the ranks of an expert TP group have different numbers of
tokens. megatron-core gathers such pieces into a list of tensors, and gloo requires tensors of equal shape in that list.
What it does: such a gather becomes an all-to-all, for which gloo accepts pieces of any length. Other gathers do not
change.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from third_party_patches.guard import MEGATRON, Patch


def gather_pieces(mine: torch.Tensor, group: dist.ProcessGroup, lengths: list[int]) -> torch.Tensor:
    """Concatenate all ranks' pieces [lengths[rank], ...]; `mine` is this rank's. All ranks of `group` must call."""
    gathered = mine.new_empty(sum(lengths), *mine.shape[1:])
    copies = torch.cat([mine] * group.size())
    dist.all_to_all_single(gathered, copies, lengths, [len(mine)] * group.size(), group=group)
    return gathered


def apply() -> None:
    """Wrap `_gather_along_first_dim` of `megatron.core.tensor_parallel.mappings`."""
    from megatron.core.tensor_parallel import mappings

    original = mappings._gather_along_first_dim
    if original.__module__ == __name__:
        return

    def gather_along_first_dim(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        return gather_pieces(input_, group, output_split_sizes)

    mappings._gather_along_first_dim = gather_along_first_dim


PATCH = Patch(MEGATRON, apply, drop_when="gloo gathers tensors of different lengths")
