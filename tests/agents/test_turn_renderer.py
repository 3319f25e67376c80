"""What follows a turn, token by token: the rest of its end, the observation, the beginning of the next answer."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.agents.observation import InitialConversation, Turn
from megatron_rl.agents.turn_reader import TurnReader
from megatron_rl.agents.turn_renderer import TurnRenderer
from megatron_rl.data.template_process import RenderLimits, TemplateRefusal

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}{{ m.content[3:] }}"
    "{% else %}{{ m.content }}{% endif %}<eos> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SUMMARY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}{{ messages|length }}"
OLD_TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' and not loop.last %}-{% else %}{{ m.content }}"
    "{% endif %}<eos> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained("assets/demo/model")


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> TurnRenderer:
    tokenizer.chat_template = template
    return TurnRenderer(tokenizer, [tokenizer.eos_token_id])


def test_a_path_is_the_whole_conversation_as_the_template_writes_it(tokenizer):
    """Three turns with observations of one and two messages, one of them without an end token before it.

    The path that grows turn by turn has the ids of the conversation rendered at once. Would not catch a template whose
    text is tokenised otherwise as a whole: the path is what the engine is given then, and what is trained.
    """
    renderer = with_template(tokenizer, CHATML)
    turns = ["7", "12", "9"]
    observations = [
        [{"role": "user", "content": "no"}],
        [{"role": "tool", "content": "1"}, {"role": "user", "content": "?"}],
    ]
    messages = [{"role": "user", "content": "guess"}]
    path = tokenizer("<user>guess<eos> <assistant>", add_special_tokens=False)["input_ids"]
    for turn, observation in zip(turns, [*observations, []], strict=True):
        drawn = [*tokenizer(turn, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        assert TurnReader(tokenizer).turn(drawn) == Turn(turn)
        path += drawn
        messages.append({"role": "assistant", "content": turn})
        if observation:
            path += renderer.following(observation, drawn[-1])
            messages += observation
    whole = "".join(f"<{message['role']}>{message['content']}<eos> " for message in messages)
    assert tokenizer.decode(path) + " " == whole
    assert path == tokenizer(whole, add_special_tokens=False)["input_ids"][:-1]


def test_text_is_joined_as_it_is(tokenizer):
    """Prompts without messages. Would not catch a tokenizer that puts something before a text."""
    renderer = TurnRenderer(tokenizer, [tokenizer.eos_token_id], is_chat=False)
    ids = renderer.following([{"role": "user", "content": "no="}], tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == "no=" and renderer.append_problem("user") is None


@pytest.mark.parametrize(
    ("template", "role", "reason"),
    [
        (CHATML, "user", None),
        (CHATML, "tool", None),
        (SUMMARY, "user", "otherwise once other messages follow"),
        (OLD_TOOLS, "tool", "of role tool as an addition"),
        (OLD_TOOLS, "user", None),
        (NO_TOOLS, "user", None),
        (NO_TOOLS, "tool", "no tools here"),
    ],
)
def test_templates_that_do_not_append_are_named_by_role(tokenizer, template, role, reason):
    """Would not catch a template that rewrites only what it has not been shown."""
    renderer = with_template(tokenizer, template)
    if template == NO_TOOLS and role == "tool":
        with pytest.raises(TemplateRefusal, match=reason):
            renderer.append_problem(role)
        return
    problem = renderer.append_problem(role)
    assert problem is None if reason is None else problem is not None and reason in problem


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("at", "does", "reason"),
    [
        ("m.role == 'assistant'", ENDLESS, "does not end within 0.2 s of CPU time"),
        ("m.content == 'bad'", ENDLESS, "does not end within 0.2 s of CPU time"),
        (
            "m.content == 'bad'",
            "{{ (10 ** 7) ** (m.content | length * 10 ** 7) }}",
            "does not end within|takes more than",
        ),
        ("m.content == 'bad'", "{{ 'x' * 10 ** 14 }}", "takes more than 0.3 GB of memory"),
        ("m.content == 'bad'", "{{ 'x' * 20_000_000 }}", "makes 200000[0-9]* characters of one conversation"),
        ("m.content == 'bad'", "{{ m.no.thing }}", "UndefinedError"),
    ],
)
def test_a_template_has_limits_at_the_start_and_at_each_turn(tokenizer, at, does, reason):
    """What it does at a role is found before a run, what it does at a word costs one turn: the next one is rendered.
    Would not catch a limit that is too small for a long conversation.
    """
    tokenizer.chat_template = CHATML.replace(
        "<{{ m.role }}>", "<{{ m.role }}>{% if " + at + " %}" + does + "{% endif %}"
    )
    renderer = TurnRenderer(
        tokenizer, [tokenizer.eos_token_id], limits=RenderLimits(0.2 if "within" in reason else 5.0, 1 << 28)
    )
    if "assistant" in at:
        with pytest.raises(TemplateRefusal, match=reason):
            renderer.append_problem("user")
        return
    assert renderer.append_problem("user") is None
    for _ in range(2):
        with pytest.raises(TemplateRefusal, match=reason):
            renderer.following([{"role": "user", "content": "bad"}], -1)
        assert tokenizer.decode(renderer.following([{"role": "user", "content": "3"}], -1)).endswith(
            "3<eos> <assistant>"
        )


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.read = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.read += len(text)
        return self.tokenizer(text, **options)


def test_of_a_text_that_is_too_long_only_the_start_is_tokenised(tokenizer):
    """By hand: of 14 MB not more than is needed to know that it has more than 100 tokens; white space, which has few
    tokens, is read further. Would not catch a tokenizer that reads the end first.
    """
    counting: Any = Counting(tokenizer)
    renderer = TurnRenderer(counting, [tokenizer.eos_token_id], is_chat=False)
    ids = renderer.following([{"role": "user", "content": "12+3" * 3_500_000}], -1, most=100)
    assert len(ids) > 100 and counting.read == 8 * 164
    whole = renderer.beginning(InitialConversation(({"role": "user", "content": "12+3" * 50},)), most=100)
    assert whole == tokenizer("12+3" * 50, add_special_tokens=False)["input_ids"]


def test_a_template_that_drops_thinking_does_not_append(tokenizer):
    """Earlier turns lose three characters. Would not catch a template that keeps short texts."""
    renderer = with_template(tokenizer, THINKING)
    assert "otherwise once other messages follow" in (renderer.append_problem("user") or "")
    with pytest.raises(TemplateRefusal):
        renderer.following([{"role": "user", "content": "no"}], tokenizer.eos_token_id)
