"""Let megatron-core's MoE router multiply without TransformerEngine.

Reason: `moe_utils` imports `te_general_gemm` inside a `try` without a fallback, and the router tests whether the name
is None. Without TransformerEngine that is a NameError.
What it does: the name is None if TransformerEngine did not set it, so the router uses `torch.mm`.
"""

from __future__ import annotations

from third_party_patches.guard import MEGATRON, Patch


def apply() -> None:
    """Define the name in `megatron.core.transformer.moe.moe_utils`."""
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)


PATCH = Patch(
    MEGATRON,
    apply,
    drop_when="moe_utils sets te_general_gemm to None when TransformerEngine is missing",
    not_needed=">=0.19",
)
