"""What a reward model with a tokenizer of its own reads of prompts and answers: real tokenizers, by hand."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.records import Batch, one_per_group, ragged, repeated, single_turn
from megatron_rl.scoring.text_reader import TextReader, without_end

# The policy reads characters: <eos> 0, <pad> 1, <think> 2 (all special), a 3, b 4, c 5, a space 6.
POLICY = ["<eos>", "<pad>", "<think>", "a", "b", "c", " "]
# The reward model reads words.
OWN = ["<s>", "?", "[user]", "[assistant]", "[end]", "a", "b", "ab", "abc", "c"]
S, UNKNOWN, USER, ASSISTANT, END, A, B, AB, ABC, C = range(10)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} [{{ m['role'] }}] {{ m['content'] }} [end]{% endfor %}"
    "{% if add_generation_prompt %} [assistant]{% endif %}"
)
ALTERNATING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


def policy_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(POLICY)}, unk_token="c"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", additional_special_tokens=["<think>"]
    )


def own_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Adds <s> to plain text by itself; the template has it in it."""
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(OWN)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", S)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="?", chat_template=template)


def reader(max_length: int = 99, template: str | None = TEMPLATE) -> TextReader:
    return TextReader(
        "reward_model", policy_tokenizer(), own_tokenizer(template), max_length, "reward_model.max_length"
    )


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def batch(raw, prompt_ids, response_ids) -> Batch:
    whole = [torch.tensor([*ids, *answer]) for ids, answer in zip(prompt_ids, response_ids, strict=True)]
    rows = single_turn(ragged(whole), torch.tensor([len(answer) for answer in response_ids]))
    rows.add(index=torch.arange(len(raw)), raw_prompt=raw)
    return rows


def rows_of(read) -> list[list[int]]:
    return [row.tolist() for row in read.batch["input_ids"].unbind()]


def test_conversations_by_hand():
    """Chat messages, another order of rows than of kinds, text, an empty answer, all in one batch.

    The answer "ab" <eos> <pad> loses both special tokens; <think> before other tokens stays, as text that is no word.
    Text gets <s> from the tokenizer, a template does not get a second one. Would not catch a template of real models.
    """
    rows = batch(
        [user("a b"), "ab ", [{"role": "system", "content": "c"}, *user("abc")], user("a")],
        [[3, 6, 4], [3, 4, 6], [5, 3, 4, 5], [3]],
        [[3, 4, 0, 1], [5, 0], [2, 6, 4, 0], []],
    )
    read = reader().read(rows)
    assert rows_of(read) == [
        [S, USER, A, B, END, ASSISTANT, AB, END],
        [S, AB, C],
        [S, UNKNOWN, C, END, USER, ABC, END, ASSISTANT, UNKNOWN, B, END],
        [S, USER, A, END, ASSISTANT, END],
    ]
    assert read.is_cut.tolist() == [False] * 4
    assert read.batch.num_sampled.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("ends", "chat", "text"),
    [
        ((), [USER, A, END, C + 1, ASSISTANT, AB, END, C + 1], [AB, C]),
        ((END,), [USER, A, END, C + 1, ASSISTANT, AB, END], [AB, C, END]),
    ],
)
def test_a_model_that_was_trained_at_the_end_token_is_asked_there(ends, chat, text):
    """The template writes a line's end behind the mark, and a text has no mark. Other models are asked at the last
    token of the text. Would not catch a folder that says the wrong of both.
    """
    vocabulary = {token: number for number, token in enumerate([*OWN, "\n"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    parts = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(parts), decoders.Fuse()
    lines = TEMPLATE.replace("{{ bos_token }}", "").replace("[end]", "[end]\\n").replace("\\n", "{{ '\\n' }}")
    own = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[end]", unk_token="?", chat_template=lines)
    reading = TextReader("reward_model", policy_tokenizer(), own, 99, "reward_model.max_length", ends)
    assert reading.token_ids([user("a"), "ab "], [[3], [3, 4, 6]], [[3, 4, 0], [5, 0]]) == [chat, text]


def test_what_is_too_long_loses_its_end():
    """verl's side. A row of exactly the limit is whole. Would not catch a limit that counts padding."""
    rows = batch([user("a b"), user("a")], [[3, 6, 4], [3]], [[3, 4, 0], [0]])
    read = reader(max_length=6).read(rows)
    assert rows_of(read) == [[S, USER, A, B, END, ASSISTANT], [S, USER, A, END, ASSISTANT, END]]
    assert read.is_cut.tolist() == [True, False]


def test_without_a_chat_template_messages_are_text():
    """What the policy reads of them, without its special tokens. Would not catch roles that only a template tells."""
    rows = batch([user("a b")], [[1, 3, 6, 4, 6, 2]], [[3, 4, 0]])
    one = reader(template=None)
    assert rows_of(one.read(rows)) == [[S, A, B, AB]]
    assert one.check([user("a b")], [[3, 6, 4]]) == [
        "note: the tokenizer of reward_model has no chat_template, so it reads messages as plain text"
    ]


def test_a_template_that_refuses():
    """Before the run as a mistake in the configuration, later as one of rewards; the row to blame is named.

    Would not catch a template that only refuses some answers before it meets one.
    """
    system = [{"role": "system", "content": "c"}, *user("a")]
    one = reader(template=ALTERNATING)
    rows = batch([user("a"), system], [[3], [5, 3]], [[3], [4]])
    with pytest.raises(RewardError, match=r"chat_template of reward_model refuses .*system.*: no system role"):
        one.read(rows)
    with pytest.raises(ConfigError, match="no system role: change the prompt, or the chat_template"):
        one.check([user("a"), system], [[3], [5, 3]])


def test_limits_that_leave_no_room():
    """ "a" has 6 tokens with an empty answer, "a b" 7. Some without room are a note, all of them a mistake.

    Would not catch answers that are cut; a metric counts those.
    """
    conversations, ids = [user("a"), user("a b")], [[3], [3, 6, 4]]
    assert reader(max_length=8).check(conversations, ids) == []
    assert reader(max_length=7).check(conversations, ids) == [
        "note: 1 of 2 prompts leave no room for a response in reward_model.max_length=7 of reward_model"
    ]
    with pytest.raises(
        ConfigError, match="max_length=6 is too small: reward_model would read nothing of any response, "
    ) as said:
        reader(max_length=6).check(conversations, ids)
    assert "the shortest of 2 prompts has 6 of its tokens; try: reward_model.max_length=14" in str(said.value)


def test_nothing_to_read():
    """A template that says nothing: there is no token to score. Would not catch a text that is only unknown."""
    with pytest.raises(RewardError, match=r"reward_model cannot score .*: its chat template makes 0 tokens"):
        reader(template="{{ '' }}").token_ids([user("a")], [[3]], [[3]])


def test_only_the_end_loses_special_tokens():
    """Would not catch an end token that the tokenizer does not call special."""
    assert without_end([0, 3, 0, 4, 1, 0], [0, 1]) == [0, 3, 0, 4]
    assert without_end([0, 1], [0, 1]) == without_end([], [0]) == []


def test_prompts_without_their_text():
    """Would not catch a run that forgets to keep it; its first step does."""
    rows = batch([user("a")], [[3]], [[3]])
    with pytest.raises(ValueError, match="raw_prompt is needed before it was made, by: data"):
        reader().read(rows.without("raw_prompt"))


def test_conversations_follow_their_rows():
    """Through repeat, selection and joining, as a batch goes. Would not catch a record that is sent to another rank."""
    six = repeated(batch([user("a"), "b", user("c")], [[3], [4], [5]], [[], [], []]), 2)
    joined = Batch.joined([six[torch.tensor([5, 0])], one_per_group(six)[1:3]])
    assert joined.objects("raw_prompt") == [user("c"), user("a"), "b", user("c")]
