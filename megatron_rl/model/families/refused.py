"""Architectures that are not here: what each needs that is missing, and the nearest supported one. Needs no torch.

An architecture whose name is close to a supported one could be read as it and be wrong without a word, so these are
refused by name. `family_of` and preflight say what the table says.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Why an architecture is refused. pattern: of its name in config.json. needs: what is missing, as a noun.

    nearest: a supported architecture; "": none is near, and names are compared.
    """

    pattern: str
    needs: str
    nearest: str = ""


VISION = "vision-language models"
GEMMA_3N = (
    "layers that hand keys and values on, embeddings of every layer, and a bound that vLLM computes over a rank's "
    "share of the columns instead of all, so that its Gemma-3n is wrong at rollout TP > 1"
)
NEMOTRON_H = (
    "state-space layers, of which vLLM copies A = -exp(A_log) at load instead of reading the trainer's weight, and "
    "experts without a gate"
)
LLAMA_4 = "attention in chunks without rotary embeddings in every fourth layer, and a router that scales inputs"

REFUSED = (
    Refusal("Llama4ForConditionalGeneration", f"{LLAMA_4}; its folders are vision-language models", "LlamaForCausalLM"),
    Refusal("Llama4*", LLAMA_4, "LlamaForCausalLM"),
    Refusal("Gemma3nForConditionalGeneration", f"{GEMMA_3N}; its folders see and hear", "Gemma3ForCausalLM"),
    Refusal("Gemma3n*", GEMMA_3N, "Gemma3ForCausalLM"),
    Refusal("Gemma4*", f"{VISION}: a dense text model in a folder of its own is supported", "Gemma4ForCausalLM"),
    Refusal("NemotronH*", NEMOTRON_H, "Qwen3MoeForCausalLM"),
    Refusal(
        "KimiLinear*", "linear attention by the gated delta rule with a gate of each element", "DeepseekV3ForCausalLM"
    ),
    Refusal("KimiK25*", f"{VISION}: K2's language model in a folder of its own is supported", "DeepseekV3ForCausalLM"),
    Refusal("Kimi*", "Kimi models that do not have DeepSeek-V3's architecture", "DeepseekV3ForCausalLM"),
    Refusal("DeepseekV*", "sparse attention", "DeepseekV3ForCausalLM"),
    Refusal("GlmMoeDsa*", "sparse attention", "Glm4MoeForCausalLM"),
    Refusal("*VL*", VISION),
    Refusal("*ForConditionalGeneration", VISION),
    Refusal("MiniCPM[VO]*", VISION),
    Refusal("*Omni*", VISION),
    Refusal("Intern*Chat*", VISION),
    Refusal("Glm*", "dense GLM models", "Glm4MoeForCausalLM"),
    Refusal("GemmaFor*", "the first Gemma; only 2 and 3 are supported", "Gemma2ForCausalLM"),
    Refusal("*Mamba*", "state-space layers"),
    Refusal("*", "models of this architecture"),
)
"""The first that fits counts. A supported architecture is never looked up."""


def refusal_of(architecture: str) -> Refusal:
    """The reason why an unknown architecture is not here."""
    return next(refusal for refusal in REFUSED if fnmatch.fnmatchcase(architecture, refusal.pattern))
