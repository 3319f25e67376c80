"""How the published instruction models of a family write conversations. Their chat template decides; this is the table.

`tests/agents/test_family_templates.py` holds templates that behave as theirs to it.
"""

from __future__ import annotations

from dataclasses import dataclass

APPEND, OWN = "append", "own"


@dataclass(frozen=True)
class ChatFormat:
    """What a family's chat template does.

    turns: `APPEND`: a turn stays as it was sampled when others follow. `OWN`: a later question makes the template drop
    what was thought before, so every turn is a conversation of its own; results of tools are appended all the same, but
    for DeepSeek. thoughts: the mark with which one begins; "" where the models do not think. tools: the names of vLLM's
    parsers that read their calls; () where the template writes no calls.
    """

    turns: str = APPEND
    thoughts: str = ""
    tools: tuple[str, ...] = ()


THINKS = "<think>"
QWEN3 = ChatFormat(OWN, THINKS, ("hermes",))
QWEN35 = ChatFormat(OWN, THINKS, ("qwen3_xml", "qwen3_coder"))
GLM = ChatFormat(OWN, THINKS, ("glm47", "glm45"))
HERMES, MISTRAL = ChatFormat(tools=("hermes",)), ChatFormat(tools=("mistral",))
NO_CALLS = ChatFormat()

CHAT_FORMATS = {
    "DeepseekV2ForCausalLM": NO_CALLS,
    "DeepseekV3ForCausalLM": ChatFormat(OWN, THINKS, ("deepseek_v3", "kimi_k2")),  # Kimi-K2's instruction models append
    "Gemma2ForCausalLM": NO_CALLS,
    "Gemma3ForCausalLM": NO_CALLS,
    "Gemma3ForConditionalGeneration": NO_CALLS,
    "Gemma4ForCausalLM": ChatFormat(OWN, "<|channel>thought", ("gemma4",)),
    "Glm4MoeForCausalLM": GLM,
    "Glm4MoeLiteForCausalLM": GLM,
    "GptOssForCausalLM": ChatFormat(OWN, "<|channel|>analysis", ("openai",)),
    "LlamaForCausalLM": ChatFormat(tools=("llama3_json",)),
    "MiMoForCausalLM": NO_CALLS,
    "MiniMaxM2ForCausalLM": ChatFormat(OWN, THINKS, ("minimax_m2",)),
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": HERMES,
    "Qwen2MoeForCausalLM": NO_CALLS,
    "Qwen2_5_VLForConditionalGeneration": NO_CALLS,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3,
    "Qwen3NextForCausalLM": HERMES,  # those that think are Qwen3's
    "Qwen3VLForConditionalGeneration": HERMES,
    "Qwen3VLMoeForConditionalGeneration": HERMES,
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5ForConditionalGeneration": QWEN35,
    "Qwen3_5MoeForCausalLM": QWEN35,
    "Qwen3_5MoeForConditionalGeneration": QWEN35,
}
"""Architecture -> format, for every family."""
