"""Fields of agents' requests that are refused, and those that are ignored, with reasons; all protocols together.

A field is refused where an agent would get something else than it asks for, ignored where the run's own settings hold.
No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT: dict[str, Any] = {"type": "text"}
ONE, OWN_END = "each request samples one response", "a turn ends at the model's own end token"
FORCED = "forced tokens are not sampled by the policy"
WHOLE = "nothing is kept between requests: send the whole conversation"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((None, 1), ONE),
    "best_of": ((None, 1), ONE),
    "stop": ((None, [], ""), OWN_END),
    "stop_sequences": ((None, []), OWN_END),
    "response_format": ((None, TEXT), FORCED),
    "text": ((None, {}), FORCED),
    "tool_choice": ((None, "auto", "none", {"type": "auto"}, {"type": "none"}), FORCED),
    "functions": ((None, []), "send tools"),
    "function_call": ((None, "auto", "none"), "send tools"),
    "chat_template_kwargs": ((None, {}), "the run has its own: data.apply_chat_template_kwargs"),
    "previous_response_id": ((None,), WHOLE),
    "conversation": ((None,), WHOLE),
    "prompt": ((None,), WHOLE),
    "background": ((None, False), "a request waits for its response"),
}
"""Field -> (values that ask for nothing special, why others are refused)."""

SAMPLING, ACCOUNT = "the run's own sampling holds", "there is no account, cache or store"
IGNORED: dict[str, str] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"), SAMPLING),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), SAMPLING),
    **dict.fromkeys(("model", "user", "metadata", "store", "service_tier", "safety_identifier"), ACCOUNT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "cache_control", "client_metadata"), ACCOUNT),
    **dict.fromkeys(("parallel_tool_calls", "max_tool_calls"), "the policy decides how often it calls"),
    **dict.fromkeys(("reasoning", "reasoning_effort", "thinking", "verbosity"), "the policy thinks as it was trained"),
    **dict.fromkeys(("truncation", "context_management", "modalities", "prediction"), "texts stay whole"),
    "top_logprobs": "log-probs of sampled tokens alone are known",
}
"""Field -> why it is ignored."""

READ = {
    *("messages", "input", "instructions", "system", "tools", "stream", "stream_options", "include"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "logprobs"),
}


def check_fields(body: Mapping[str, Any]) -> None:
    """Raise ValueError for a field whose value is refused."""
    for name, (allowed, why) in REFUSED.items():
        value = body.get(name)
        if name == "text" and isinstance(value, Mapping) and value.get("format") in (None, TEXT):
            continue
        if isinstance(value, dict) and name == "tool_choice":
            value = {"type": value.get("type")}
        if value not in allowed:
            raise ValueError(f"{name}={body[name]!r:.80} is not supported: {why}")


def is_text_only(body: Mapping[str, Any]) -> bool:
    """Return whether calls in the response are its text, as a request asks."""
    choice = body.get("tool_choice")
    return choice == "none" or (isinstance(choice, Mapping) and choice.get("type") == "none")


def num_unknown(body: Any) -> int:
    """Return the number of fields that neither list has, and that no protocol reads."""
    known = READ | REFUSED.keys() | IGNORED.keys()
    return sum(name not in known for name in body) if isinstance(body, dict) else 0
