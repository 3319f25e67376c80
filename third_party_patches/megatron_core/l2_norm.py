"""Let megatron-core take the norm of all gradients without waiting for the device once a tensor.

Reason: without transformer-engine and apex `clip_grads` makes a tensor of the norms of all shards with `torch.tensor`,
which reads them one by one: 44 to 63 waits of the host for each update of a 70B model's stages.
What it does: the norms stay on the device, as one tensor, whose norm is taken there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from third_party_patches.guard import MEGATRON, Patch


def l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool, *args: Any
) -> tuple[Tensor, None]:
    """Return (float32 [1], the norm of all tensors of the lists together, None), in the form of amp_C's function."""
    norms = [norm for tensors in tensor_lists for norm in torch._foreach_norm(tensors)]
    return torch.stack(norms).norm().float().view(1), None


def apply() -> None:
    """Replace the function in `clip_grads`, unless it is transformer-engine's or apex's."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm


PATCH = Patch(MEGATRON, apply, drop_when="local_multi_tensor_l2_norm reads no number from the device")
