"""Let vLLM choose the kernels of experts as without LoRA where no adapter is for experts.

Reason: with LoRA on, vLLM takes the kernels of experts that can add adapters, whichever linears have some. Those are
Triton's, which CPUs do not have.
What it does: experts count as having adapters only if `lora_target_modules` names them, or nothing.
"""

from __future__ import annotations

from typing import Any

from third_party_patches.guard import VLLM, Patch

EXPERTS = {"experts"}


def apply() -> None:
    """Wrap `FusedMoEConfig.__post_init__`."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    original = FusedMoEConfig.__post_init__
    if original.__module__ == __name__:
        return

    def __post_init__(self: Any) -> None:
        original(self)
        lora = get_current_vllm_config().lora_config if self.is_lora_enabled else None
        if lora is not None and lora.target_modules is not None and not EXPERTS & set(lora.target_modules):
            self.is_lora_enabled = False

    __post_init__.__module__ = __name__
    FusedMoEConfig.__post_init__ = __post_init__


PATCH = Patch(VLLM, apply, drop_when="vLLM looks at lora_target_modules before it chooses kernels of experts")
