"""Gather and reduce-scatter pieces of different lengths over gloo.

Reason: with expert and expert tensor parallelism together, ranks of one expert TP group bring different numbers of
tokens; megatron-core gathers and reduce-scatters such pieces as lists, and gloo wants all tensors of a list alike.
What it does: both become an all-to-all, which gloo does with pieces of any length. Equal pieces travel as before.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from third_party_patches.guard import Patch


def gather_pieces(mine: torch.Tensor, group: dist.ProcessGroup, lengths: list[int]) -> torch.Tensor:
    """All ranks' pieces [lengths[rank], ...] one after the other; `mine` is this rank's. All of `group` must call."""
    gathered = mine.new_empty(sum(lengths), *mine.shape[1:])
    copies = torch.cat([mine] * group.size())
    dist.all_to_all_single(gathered, copies, lengths, [len(mine)] * group.size(), group=group)
    return gathered


def reduce_pieces(whole: torch.Tensor, group: dist.ProcessGroup, lengths: list[int]) -> torch.Tensor:
    """The sum over ranks of this rank's piece of `whole` [sum(lengths), ...]. All of `group` must call."""
    length = lengths[group.rank()]
    pieces = whole.new_empty(group.size() * length, *whole.shape[1:])
    dist.all_to_all_single(pieces, whole.contiguous(), [length] * group.size(), lengths, group=group)
    return pieces.view(group.size(), length, *whole.shape[1:]).sum(0)


def apply() -> None:
    """Replace the two functions of `megatron.core.tensor_parallel.mappings` that take split sizes."""
    from megatron.core.tensor_parallel import mappings

    if mappings._gather_along_first_dim.__module__ == __name__:
        return
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_along_first_dim(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        return gather_pieces(input_, group, output_split_sizes)

    def reduce_scatter_along_first_dim(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        return reduce_pieces(input_, group, input_split_sizes)

    mappings._gather_along_first_dim = gather_along_first_dim
    mappings._reduce_scatter_along_first_dim = reduce_scatter_along_first_dim


PATCH = Patch(
    name="megatron_core.uneven_splits",
    distribution="megatron-core",
    versions=">=0.16.1,<0.17",
    drop_when="gloo gathers and reduce-scatters tensors of different lengths",
    apply=apply,
)
