"""Let megatron-core sort tokens by expert without waiting for the device.

Reason: `permute` selects tokens and weights by a mask, twice a layer and forward pass, and how many it selects is known
only to the device. Without dropped tokens it is known to the host: the dispatcher passes it.
What it does: where the number is given, places of the mask are looked up once, with that number as their size. The
order is that of the mask: by expert, then by token.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from third_party_patches.guard import MEGATRON, Patch


def permuted(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, num_out_tokens: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (tokens [n, H] sorted by expert, their weights [n] or None, the number of each one's token, int64 [n]).

    tokens [T, H]; routing_map bool [T, experts], true n = num_out_tokens times; probs [T, experts] or None.
    """
    places = torch.nonzero_static(routing_map.T.flatten(), size=num_out_tokens)[:, 0]
    sorted_indices = places % len(tokens)
    weights = None if probs is None else probs.T.flatten().index_select(0, places)
    return tokens.index_select(0, sorted_indices), weights, sorted_indices


def apply() -> None:
    """Wrap `permute` where it is defined and where the dispatchers imported it."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    original = moe_utils.permute
    if original.__module__ == __name__:
        return

    pads = "tokens_per_expert" in inspect.signature(original).parameters

    def permute(
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor | None = None,
        num_out_tokens: int | None = None,
        fused: bool = False,
        drop_and_pad: bool = False,
        **padding: Any,
    ) -> Any:
        if fused or drop_and_pad or type(num_out_tokens) is not int:
            return original(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad, **padding)
        result = permuted(tokens, routing_map, probs, num_out_tokens)
        # Without its kernel, which also pads, Megatron's has no places of padding and leaves counts as they are.
        return (*result, None, padding.get("tokens_per_expert")) if pads else result

    moe_utils.permute = token_dispatcher.permute = permute


PATCH = Patch(MEGATRON, apply, drop_when="permute selects a number of tokens that the host knows")
