"""Chat templates of real models, those that vLLM brings: which go on with a conversation, and that it is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from megatron_rl.agents.observation import InitialConversation, Message, Turn
from megatron_rl.agents.turn_renderer import TurnRenderer
from megatron_rl.data.template_process import TemplateRefusal

APPENDS, REWRITES, REFUSES = "appends", "rewrites", "refuses"
KNOWN = {
    "basic": (APPENDS, APPENDS),
    "blip2": (APPENDS, REFUSES),  # it leaves out messages of tools
    "chatml": (APPENDS, APPENDS),
    "deepseek_ocr": (APPENDS, REFUSES),  # roles must alternate
    "deepseek_vl2": (APPENDS, REFUSES),
    "kimi_audio": (REFUSES, REFUSES),  # it reads no messages
    "minicpmv45": (REWRITES, REWRITES),  # it drops the thinking of earlier turns
}
"""Name -> what it does with messages of the user, and of tools."""
LEAD = {"blip2": " "}
"""What a template writes before an answer and not at the end of a prompt: the model draws it."""


def folder() -> Path:
    import vllm

    return Path(vllm.__file__).parent / "transformers_utils/chat_templates"


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """Bytes, so that every template can be tokenised."""
    tokenizer = ByT5Tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = (folder() / f"template_{name}.jinja").read_text()
    return tokenizer


def behaviour(renderer: TurnRenderer, role: str) -> str:
    try:
        return APPENDS if renderer.append_problem(role) is None else REWRITES
    except TemplateRefusal:
        return REFUSES


def test_every_template_is_known():
    """Would not catch a template of another version under the same name."""
    assert {file.stem.removeprefix("template_") for file in folder().glob("*.jinja")} == KNOWN.keys()


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_appended_is_what_the_template_writes(name):
    """Three turns, thinking in two of them: the path that grows turn by turn has the ids of the whole conversation, or
    the template is found to rewrite or to refuse. Would not catch a template that rewrites after more turns.
    """
    tokenizer = tokenizer_of(name)
    renderer = TurnRenderer(tokenizer, [tokenizer.eos_token_id])
    assert tuple(behaviour(renderer, role) for role in ("user", "tool")) == KNOWN[name]
    for role, found in zip(("user", "tool"), KNOWN[name], strict=True):
        if found != APPENDS:
            continue
        messages: list[Message] = [{"role": "user", "content": "What is it?"}]
        path = renderer.beginning(InitialConversation(tuple(messages)))
        for text in ("<think>\nhm\n</think>\n\nA cat.", "A dog.", "<think>\nyes\n</think>\n\nA bird."):
            path += tokenizer(LEAD.get(name, "") + text, add_special_tokens=False)["input_ids"]
            messages += [Turn(text).as_message(), {"role": role, "content": f"No, not {text[-5:]}"}]
            path += renderer.following(messages[-1:], last_token=-1)
        assert path == renderer.beginning(InitialConversation(tuple(messages)))
