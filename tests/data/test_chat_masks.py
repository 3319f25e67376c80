"""Which tokens of conversations count: exactly those that the model generates, under several kinds of templates."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import (
    BARE,
    CHATML,
    CLOSED,
    FORGETFUL,
    GLM_ENDS,
    LLAMA3,
    MARKED,
    QWEN3,
    STRICT,
    byte_level,
    glm,
    metaspace,
)

from megatron_rl.data.chat_template import ChatTemplate, plain_draft
from megatron_rl.data.example_rows import Chat, Text
from megatron_rl.data.row_problems import RowProblem
from megatron_rl.data.tokens import Encoder, Tokens
from megatron_rl.errors import ConfigError

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "marked": MARKED, "strict": STRICT, "bare": BARE}
TWO_TURNS = [
    {"role": "user", "content": "what is the answer?"},
    {"role": "assistant", "content": "forty two."},
    {"role": "user", "content": "no"},
    {"role": "assistant", "content": "it is the other"},
]


def encoded(tokenizer, messages, first=0, loss_on="answers", tools=None, append_eos=True, ends=(), **kwargs):
    drafts = ChatTemplate(tokenizer, kwargs, ends).drafts(Chat(messages, first, tools), loss_on)
    return Encoder(tokenizer, append_eos, ends).encode(drafts)


def runs(tokens: Tokens) -> list[tuple[list[int], list[int]]]:
    """(tokens before, tokens that count) of each run of tokens that count."""
    found, place = [], 0
    for counts, group in itertools.groupby(tokens.counts):
        end = place + len(list(group))
        if counts:
            found.append((tokens.ids[:place], tokens.ids[place:end]))
        place = end
    return found


def counted(tokenizer, tokens: Tokens) -> list[str]:
    return [tokenizer.decode(own, clean_up_tokenization_spaces=False) for _, own in runs(tokens)]


#  template, end token, what counts
BY_HAND = [
    pytest.param("chatml", "<|im_end|>", ["forty two.<|im_end|>", "it is the other<|im_end|>"], id="chatml"),
    pytest.param("chatml", "<eos>", ["forty two.<|im_end|>\n", "it is the other<|im_end|>\n"], id="other end token"),
    pytest.param("llama3", "<|eot_id|>", ["forty two.<|eot_id|>", "it is the other<|eot_id|>"], id="llama 3"),
    pytest.param("marked", "<|im_end|>", ["forty two.<|im_end|>", "it is the other<|im_end|>"], id="marks"),
    pytest.param("strict", "<eos>", ["forty two. ", "it is the other <eos>"], id="no end mark"),
    pytest.param("bare", "<eos>", ["forty two.", "it is the other<eos>"], id="nothing around"),
]


@pytest.mark.parametrize(("name", "eos", "expected"), BY_HAND)
def test_two_turns_by_hand(name, eos, expected):
    """What counts of each turn, as text. Would not catch other tokens of the same text, which the sweep below does."""
    tokenizer = byte_level(TEMPLATES[name], eos)
    (one,) = encoded(tokenizer, TWO_TURNS)
    assert counted(tokenizer, one) == expected
    assert one.prompt_length == one.counts.index(True)
    (last,) = encoded(tokenizer, TWO_TURNS, loss_on="last")
    assert counted(tokenizer, last) == expected[1:]
    (whole,) = encoded(tokenizer, TWO_TURNS, loss_on="all")
    assert (
        whole.ids[-1] == one.ids[-1]
        and whole.counts == [False] + [True] * (len(whole.ids) - 1)
        and whole.prompt_length == 0
    )
    if "<|" in TEMPLATES[name]:  # special tokens at the edges, so the text has the same tokens however it is cut
        assert last.ids == one.ids == whole.ids


def test_a_turn_whose_thought_is_taken_out_later_is_learned_in_its_own_text():
    """Qwen's way: the first answer counts with its thought, the last after a history without one.

    Would not catch a template that takes out more than thoughts.
    """
    tokenizer = byte_level(QWEN3)
    messages = [dict(one) for one in TWO_TURNS]
    messages[1]["content"] = "<think>\nof that\n</think>\n\nforty two."
    first, last = encoded(tokenizer, messages)
    assert counted(tokenizer, first) == ["<think>\nof that\n</think>\n\nforty two.<|im_end|>"]
    assert counted(tokenizer, last) == ["<think>\n\n</think>\n\nit is the other<|im_end|>"]
    assert "of that" not in tokenizer.decode(last.ids) and "no<|im_end|>" not in tokenizer.decode(first.ids)
    (quiet,) = encoded(tokenizer, messages, first=3, enable_thinking=False)
    assert counted(tokenizer, quiet) == ["it is the other<|im_end|>"]


def test_a_call_its_answer_and_what_follows():
    """Both turns of the assistant count, the tool's message between them does not. Would not catch a wrong schema."""
    tokenizer = byte_level(LLAMA3, "<|eot_id|>")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        TWO_TURNS[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        TWO_TURNS[1],
    ]
    (one,) = encoded(tokenizer, messages, tools=[{"type": "function", "function": {"name": "add"}}])
    assert counted(tokenizer, one) == ['{"name": "add", "arguments": {"a": 1}}<|eot_id|>', "forty two.<|eot_id|>"]


def test_a_turn_that_the_next_message_ends():
    """GLM's way: each turn counts to the token at which generation stops, which begins the next message; a last one
    gets it. Would not catch a role whose messages begin in two ways.
    """
    tokenizer, call = glm(), {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ends = tokenizer.convert_tokens_to_ids(GLM_ENDS)
    calling = {"role": "assistant", "content": "so", "tool_calls": [call]}
    messages = [*TWO_TURNS[:3], calling, {"role": "tool", "content": "1"}, TWO_TURNS[3]]
    begin, called = "\n<think></think>\n", '<tool_call>add {"a": 1}</tool_call>'
    spans = [
        f"{begin}forty two.<|user|>",
        f"{begin}so{called}<|observation|>",
        f"{begin}it is the other<|user|>",
    ]
    (one,) = encoded(tokenizer, messages, ends=ends)
    assert counted(tokenizer, one) == spans
    (short,) = encoded(tokenizer, messages[:4], ends=ends)
    assert counted(tokenizer, short) == spans[:2]
    (last,) = encoded(tokenizer, messages, loss_on="last", ends=ends)
    assert counted(tokenizer, last) == spans[2:]
    (open_,) = encoded(tokenizer, messages, append_eos=False, ends=ends)
    assert counted(tokenizer, open_) == [*spans[:2], spans[2].removesuffix("<|user|>")]


def test_a_turn_ends_at_each_token_at_which_generation_stops():
    """The tokenizer's end token is another than the template's, which generation_config.json names, too. Would not
    catch an end token inside of an answer, which ends no turn of the file.
    """
    tokenizer = byte_level(CHATML, "<eos>")
    (one,) = encoded(tokenizer, TWO_TURNS, ends=tokenizer.convert_tokens_to_ids(["<eos>", "<|im_end|>"]))
    assert counted(tokenizer, one) == ["forty two.<|im_end|>", "it is the other<|im_end|>"]
    assert tokenizer.decode(one.ids).endswith("<|im_end|>")


content = st.text(alphabet="ab <>/th\nü ,.", min_size=1, max_size=8).filter(str.strip)
think = st.tuples(content, content).map(lambda two: f"<think>\n{two[0]}\n</think>\n\n{two[1]}")
chats = st.tuples(st.lists(st.tuples(content, st.one_of(content, think)), min_size=1, max_size=3), st.booleans()).map(
    lambda drawn: drawn[0]
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(turns=chats, loss_on=st.sampled_from(["answers", "last"]))
def test_every_answer_stands_after_the_prompt_that_generation_starts_from(name, turns, loss_on):
    """Token for token: before each answer stands what transformers makes of the messages before it and the generation
    prompt, or where a template has no end mark the same text; every answer counts once.

    Would not catch a template of a kind that is not among these.
    """
    tokenizer = byte_level(TEMPLATES[name], "<eos>" if name in ("strict", "bare") else "<|im_end|>")
    messages = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    numbers = range(1, len(messages), 2) if loss_on == "answers" else [len(messages) - 1]
    answers = {}
    for number in numbers:
        kwargs = {"return_dict": False, "tokenize": name not in ("strict", "bare")}
        before = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, **kwargs)
        after = tokenizer.apply_chat_template(messages[: number + 1], **kwargs)
        own = after[len(before) :]
        if name in ("chatml", "qwen3", "marked"):
            own = own[:-1]  # the line break after the end token
        if name in ("strict", "bare") and number == len(messages) - 1 and not own.rstrip().endswith("<eos>"):
            own += "<eos>"
        answers[number] = (before, own)
    found = [run for one in encoded(tokenizer, messages, loss_on=loss_on) for run in runs(one)]
    if name in ("strict", "bare"):
        found = [tuple(tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in run) for run in found]
    assert sorted(found) == sorted(answers.values())


def test_marks_agree_with_transformers():
    """The mask that transformers reads from the same marks. Would not catch marks around two parts of a turn."""
    tokenizer = byte_level(MARKED)
    (one,) = encoded(tokenizer, TWO_TURNS)
    expected = tokenizer.apply_chat_template(TWO_TURNS, return_assistant_tokens_mask=True, return_dict=True)
    assert [*one.ids, tokenizer.encode("\n")[0]] == expected["input_ids"]
    assert [int(c) for c in one.counts] == expected["assistant_masks"][:-1]


def test_marks_of_a_template_that_closes_every_text():
    """The answer and the closing token count, as in transformers; an earlier answer is learned in a text of its own,
    which is closed, too. Would not catch marks around half of an answer.
    """
    tokenizer = byte_level(CLOSED, "<eos>")
    (one,) = encoded(tokenizer, TWO_TURNS[:2])
    expected = tokenizer.apply_chat_template(TWO_TURNS[:2], return_assistant_tokens_mask=True, return_dict=True)
    assert one.ids == expected["input_ids"] and [int(c) for c in one.counts] == expected["assistant_masks"]
    texts = [counted(tokenizer, text) for text in encoded(tokenizer, TWO_TURNS)]
    assert texts == [["forty two.<|im_end|>\n<eos>"], ["it is the other<|im_end|>\n<eos>"]]
    unmarked = MARKED.replace("{{ m.content + '<|im_end|>' }}", "{{ '<|im_end|>' }}").replace(
        "{% generation %}", "{{ m.content }}{% generation %}"
    )
    with pytest.raises(RowProblem, match="mark around this turn"):
        encoded(byte_level(unmarked), TWO_TURNS)


def test_several_templates_and_no_default_name_the_key():
    """Two names, none of them `default`: refused with the key that names one, which then works. Would not catch a name
    that is no template.
    """
    tokenizer = byte_level(CHATML).__class__(tokenizer_object=byte_level(CHATML).backend_tokenizer)
    tokenizer.chat_template = {"short": CHATML, "long": MARKED}
    with pytest.raises(ConfigError, match=r"long, short.*chat_template=long"):
        encoded(tokenizer, TWO_TURNS)
    assert encoded(tokenizer, TWO_TURNS, append_eos=False, chat_template="short")
    for wrong in (5, {"default": CHATML}, [CHATML], "", "shrot"):
        with pytest.raises(ConfigError, match=r"chat_template=.* must be a template, or .*: long, short; try: null"):
            encoded(tokenizer, TWO_TURNS, chat_template=wrong)


def test_a_template_whose_prompt_is_no_beginning_is_refused():
    """A generation prompt that opens a thought which answers do not have. Would not catch one that only looks alike."""
    with pytest.raises(RowProblem, match="template_rewrites"):
        encoded(byte_level(FORGETFUL), TWO_TURNS)


def test_what_a_template_refuses_is_a_bad_row():
    """Its own exception, and an expression that fails. Would not catch a template that loops for ever."""
    system = {"role": "system", "content": "You help."}
    with pytest.raises(RowProblem, match="roles must alternate"):
        encoded(byte_level(STRICT), [system, *TWO_TURNS])
    with pytest.raises(RowProblem, match="template_refuses"):
        encoded(byte_level("{{ 1 + messages[0].content }}"), TWO_TURNS)
    with pytest.raises(ConfigError, match="no chat_template"):
        encoded(byte_level(None), TWO_TURNS)


def test_an_altered_answer_is_noticed():
    """One written in capitals is, one as it is in the file is not. Would not catch blanks around it."""
    template = ChatTemplate(byte_level("{% for m in messages %}{{ m.content | upper }}{% endfor %}"), {})
    assert template.drafts(Chat(TWO_TURNS, 0), "answers")[0].is_altered
    assert not ChatTemplate(byte_level(CHATML), {}).drafts(Chat(TWO_TURNS, 0), "answers")[0].is_altered


#  tokenizer, prompt, answer, tokens before, tokens that count, split
PLAIN = [
    pytest.param(
        byte_level(None, "<eos>"), "what is", " the answer", "what is", " the answer<eos>", False, id="a word"
    ),
    pytest.param(
        byte_level(None, "<eos>"), "what is ", "the answer", "what is ", "the answer<eos>", True, id="a blank"
    ),
    pytest.param(byte_level(None, "<eos>", True), "what", " is", "<bos>what", " is<eos>", False, id="begin token"),
    pytest.param(byte_level(None, "<eos>"), "", "the answer", "t", "he answer<eos>", False, id="no prompt"),
    pytest.param(byte_level(None, "<eos>"), "what", " is<eos>", "what", " is<eos>", False, id="ends already"),
    pytest.param(metaspace(None), "what is", " the answer", "what is", "the answer<eos>", False, id="metaspace"),
]


@pytest.mark.parametrize(("tokenizer", "prompt", "answer", "before", "after", "is_split"), PLAIN)
def test_plain_answers_begin_where_their_prompt_ends(tokenizer, prompt, answer, before, after, is_split):
    """The prompt's own tokens, the answer's, one end token. Would not catch a tokenizer that changes texts.

    In the case without a prompt the first token cannot count; it is the "t" only if no merge has taken it.
    """
    (one,) = Encoder(tokenizer, append_eos=True).encode([plain_draft(Text(prompt, answer), "answers")])
    ((head, own),) = runs(one)
    assert one.is_split == is_split
    if prompt:
        assert head == tokenizer(prompt)["input_ids"] and one.prompt_length == len(head)
        assert tokenizer.decode(head, clean_up_tokenization_spaces=False) == before
        assert tokenizer.decode(own, clean_up_tokenization_spaces=False).strip() == after.strip()
    else:
        assert len(head) == 1 and tokenizer.decode(one.ids) == "the answer<eos>" and one.prompt_length == 0


def test_a_blank_before_every_text_is_no_part_of_an_answer():
    """Tokenised apart, the answer would get one more blank: then the token at the edge is the answer's. Would not catch
    such a tokenizer in conversations, which special tokens cut.
    """
    tokenizer = metaspace(None)
    (one,) = Encoder(tokenizer, append_eos=False).encode([plain_draft(Text("what is ", "the answer"), "answers")])
    assert tokenizer.decode(one.ids) == "what is the answer"
    assert one.is_split and tokenizer.decode([i for i, c in zip(one.ids, one.counts, strict=True) if c]).strip() == (
        "the answer"
    )


def test_no_end_token_to_append():
    """Refused with the key that does without. Would not catch an end token of another name."""
    tokenizer = byte_level(None, "<eos>").__class__(tokenizer_object=byte_level(None, "<eos>").backend_tokenizer)
    draft = plain_draft(Text("what", " is"), "answers")
    with pytest.raises(ConfigError, match=r"data\.append_eos=false"):
        Encoder(tokenizer, append_eos=True).encode([draft])
    assert Encoder(tokenizer, append_eos=False).encode([draft])[0].counts[-1]
