"""Let megatron-core's dispatcher of tokens to experts hold nothing of a pass that is over.

Reason: it keeps the routing weights of its last pass, and with them their graph. That holds the layer's input, and
after the backward pass of a recomputed layer the input's gradient: two hidden states a layer, until the same layer runs
again. While a rank generates, none does.
What it does: weights, mask and places are forgotten when the last tokens are back, which is their last use.
"""

from __future__ import annotations

from typing import Any

from third_party_patches.guard import MEGATRON, Patch

OF_A_PASS = ("probs", "routing_map", "reversed_local_input_permutation_mapping")
"""Attributes that `dispatch_preprocess` sets and nothing reads after `combine_postprocess`."""


def apply() -> None:
    """Wrap the last method of a pass of `MoEAlltoAllTokenDispatcher`."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    original = MoEAlltoAllTokenDispatcher.combine_postprocess
    if original.__module__ == __name__:
        return

    def combine_postprocess(dispatcher: Any, permutated_local_input_tokens: Any) -> Any:
        output = original(dispatcher, permutated_local_input_tokens)
        for name in OF_A_PASS:
            setattr(dispatcher, name, None)
        return output

    MoEAlltoAllTokenDispatcher.combine_postprocess = combine_postprocess


PATCH = Patch(MEGATRON, apply, drop_when="the all-to-all dispatcher clears its tensors after a pass")
