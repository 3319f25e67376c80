"""Let megatron-core's MoE dispatcher count tokens on the CPU.

Reason: the dispatcher turns the token counts of each rank into numbers with `maybe_move_tensor_to_cpu`, which leaves
tensors that are on the CPU already as they are; all-to-all then refuses a tensor as its list of split sizes.
What it does: a CPU tensor that is wanted as numpy becomes numpy.
"""

from __future__ import annotations

import torch

from third_party_patches.guard import MEGATRON, Patch


def counts_on_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """A CPU tensor as numpy if asked for; everything else (numbers, None) as it is. There are no streams."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def apply() -> None:
    """Replace `maybe_move_tensor_to_cpu` where it is defined and where the dispatcher imported it."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = counts_on_cpu


PATCH = Patch(MEGATRON, apply, drop_when="maybe_move_tensor_to_cpu converts tensors that are on the CPU already")
