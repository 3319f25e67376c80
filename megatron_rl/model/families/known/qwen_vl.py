"""Qwen's models that also read images, of which the language model is trained; the vision tower is passed through."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.model.families.family import Carried
from megatron_rl.model.families.known import qwen2, qwen3

FAMILIES = (
    # Qwen2.5-VL: Qwen2 under its own names, the vision tower next to it. Older folders have no text_config.
    qwen2.FAMILIES[0].within(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        carried=Carried(("visual.",)),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "eos_token_id": 151_645},
        folder_prefix="model.",
    ),
    # Qwen3-VL, dense.
    replace(qwen3.FAMILIES[0], window=None).within(  # whatever its text_config says
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        carried=Carried(("model.visual.",)),
        defaults={"rope_theta": 500_000.0},
    ),
)
