"""Files of every schema, from the disk to tokens: what each row becomes, long rows, reports and orders."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CHATML, QWEN3, byte_level

from megatron_rl.data.prompt_mixture import MixtureCursor
from megatron_rl.data.reading import read_examples, read_labelled, read_rankings, read_scored
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.data.row_problems import RowProblem
from megatron_rl.data.tokens import Tokens, fitted
from megatron_rl.errors import ConfigError

USER = {"role": "user", "content": "what is it?"}
THAT, OTHER = ({"role": "assistant", "content": text} for text in ("that", "the other"))
TOKENIZER = byte_level(CHATML)


def write(path, rows) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def shown(example, tokenizer=TOKENIZER) -> tuple[str, str]:
    """(prompt, tokens that count) as text."""
    prompt = tokenizer.decode(example.tokens[: example.prompt_length])
    return prompt, tokenizer.decode(example.tokens[example.loss_mask])


PROMPT = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n"

#  rows of a file, options, (prompt, what counts) of the only example
EXAMPLES = [
    pytest.param([{"messages": [USER, THAT]}], {}, (PROMPT, "that<|im_end|>"), id="messages"),
    pytest.param([{"prompt": "what is it?", "response": "that"}], {}, (PROMPT, "that<|im_end|>"), id="verl"),
    pytest.param([{"prompt": [USER], "completion": [THAT]}], {}, (PROMPT, "that<|im_end|>"), id="TRL's messages"),
    pytest.param([{"prompt": [USER], "response": "that"}], {}, (PROMPT, "that<|im_end|>"), id="messages and text"),
    pytest.param([{"prompt": "what", "completion": " is"}], {}, ("what", " is<|im_end|>"), id="TRL's texts"),
    pytest.param(
        [{"prompt": "what is it?", "completion": "that"}],
        {"prompt_as_chat": True},
        (PROMPT, "that<|im_end|>"),
        id="key",
    ),
    pytest.param(
        [{"prompt": "what", "response": " is"}], {"prompt_as_chat": False}, ("what", " is<|im_end|>"), id="other key"
    ),
    pytest.param(
        [{"a": {"q": "what", "r": " is"}}],
        {"prompt_key": "a.q", "response_key": "a.r", "prompt_as_chat": False, "append_eos": False},
        ("what", " is"),
        id="fields of structs",
    ),
    pytest.param([{"text": "zq"}], {}, ("", "q<|im_end|>"), id="plain text"),
]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(("rows", "options", "expected"), EXAMPLES)
def test_examples(rows, options, expected, suffix, tmp_path):
    """One row of each schema in both formats. Would not catch rows that get into each other's way."""
    path = write(tmp_path / f"a.{suffix}", rows)
    (example,), report = read_examples([path], TOKENIZER, ReadingOptions(**options))
    assert shown(example) == expected
    assert (example.where.file, example.where.row, example.where.line) == (path, 0, 1 if suffix == "jsonl" else None)
    assert example.tokens.dtype == torch.int64 and example.loss_mask.dtype == torch.bool
    assert report.num_tokens == len(example.tokens) and report.num_counted == example.num_counted
    assert len(report.lines()[0].splitlines()) == 1 and report.lines()[0].startswith(f"{path}: ")


#  rows, options, prompt, what counts of each answer, margins
RANKINGS = [
    pytest.param(
        [{"prompt": "what", "chosen": " is", "rejected": " it"}],
        {},
        "what",
        [" is<|im_end|>", " it<|im_end|>"],
        (0.0,),
        id="texts",
    ),
    pytest.param(
        [{"prompt": [USER], "chosen": [THAT], "rejected": [OTHER], "margin": 2}],
        {},
        PROMPT,
        ["that<|im_end|>", "the other<|im_end|>"],
        (2.0,),
        id="messages, margin",
    ),
    pytest.param(
        [{"chosen": [USER, OTHER], "rejected": [USER, THAT]}],
        {},
        PROMPT,
        ["the other<|im_end|>", "that<|im_end|>"],
        (0.0,),
        id="prompt in both",
    ),
    pytest.param(
        [{"prompt": "what is it?", "chosen": [USER, OTHER], "rejected": [USER, THAT]}],
        {},
        PROMPT,
        ["the other<|im_end|>", "that<|im_end|>"],
        (0.0,),
        id="prompt in both and in a column",
    ),
    pytest.param(
        [{"chosen": "Q: what A: the other", "rejected": "Q: what A: that"}],
        {},
        "Q: what A:",
        [" the other<|im_end|>", " that<|im_end|>"],
        (0.0,),
        id="texts with the prompt in both",
    ),
    pytest.param(
        [{"prompt": "what", "answers": [" a", " b", " c"], "scores": [1.0, 3.0, 2.5]}],
        {"margin_key": "scores"},
        "what",
        [" b<|im_end|>", " c<|im_end|>", " a<|im_end|>"],
        (0.5, 1.5),
        id="scores and margins of them",
    ),
    pytest.param(
        [{"prompt": [USER], "answers": [[THAT], [OTHER]], "ranks": [2, 1]}],
        {},
        PROMPT,
        ["the other<|im_end|>", "that<|im_end|>"],
        (0.0,),
        id="ranks of messages",
    ),
    pytest.param(
        [{"prompt": "what", "answers": [" a", " b", " c"], "margin": [0.5, 0.25]}],
        {},
        "what",
        [" a<|im_end|>", " b<|im_end|>", " c<|im_end|>"],
        (0.5, 0.25),
        id="the best first",
    ),
]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(("rows", "options", "prompt", "answers", "margins"), RANKINGS)
def test_rankings(rows, options, prompt, answers, margins, suffix, tmp_path):
    """Order, shared prompt, margins. Would not catch a loss that takes the worst for the best."""
    (ranking,), _ = read_rankings([write(tmp_path / f"a.{suffix}", rows)], TOKENIZER, ReadingOptions(**options))
    assert [shown(answer) for answer in ranking.answers] == [(prompt, answer) for answer in answers]
    assert ranking.margins == margins and ranking.margin(0, len(answers) - 1) == sum(margins)
    prompts = {tuple(answer.tokens[: ranking.prompt_length].tolist()) for answer in ranking.answers}
    assert len(prompts) == 1


def test_labels_and_scores(tmp_path):
    """Labels as booleans and numbers, pairs as two answers, scores. Would not catch a label that is turned round."""
    rows = [
        {"prompt": "what", "completion": " is", "label": True},
        {"prompt": "what", "completion": " it", "label": False},
    ]
    labelled, _ = read_labelled([write(tmp_path / "a.parquet", rows)], TOKENIZER, ReadingOptions())
    assert [(shown(one.example)[1], one.desirable) for one in labelled] == [
        (" is<|im_end|>", True),
        (" it<|im_end|>", False),
    ]
    pairs = [{"prompt": "what", "chosen": " is", "rejected": " it"}]
    of_pairs, report = read_labelled([write(tmp_path / "b.parquet", pairs)], TOKENIZER, ReadingOptions())
    assert [(shown(one.example)[1], one.desirable) for one in of_pairs] == [
        (shown(one.example)[1], one.desirable) for one in labelled
    ]
    assert (report.files[0].num_rows, report.files[0].num_records) == (1, 2)
    scores = [{"messages": [USER, THAT, USER, OTHER], "score": -1.5}]
    (scored,), _ = read_scored([write(tmp_path / "c.jsonl", scores)], TOKENIZER, ReadingOptions())
    assert scored.score == -1.5 and shown(scored.example)[1] == "the other<|im_end|>"


def test_messages_of_parquet_have_no_nulls(tmp_path):
    """Arrow gives every message all fields and tools their union: a template sees what was written. Parts of text are
    joined, and a call and its answer get an id. Would not catch a null that was meant.
    """
    template = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools | tojson }}<|im_end|>"
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "4"}, THAT]
    tools = [{"name": "add", "a": "int"}, {"name": "sub", "b": "int"}]
    path = write(tmp_path / "a.parquet", [{"messages": messages, "tools": tools}])
    (example,), _ = read_examples([path], byte_level(template), ReadingOptions(loss_on="all"))
    lines = byte_level(template).decode(example.tokens).removesuffix("<|im_end|>").split("\n")
    called = {"role": "assistant", "content": "", "tool_calls": [call | {"type": "function", "id": "000000000"}]}
    answered = messages[2] | {"name": "add", "tool_call_id": "000000000"}
    assert [json.loads(line) for line in lines] == [USER, called, answered, THAT, tools]


def test_rows_that_a_template_rewrites_become_several_examples(tmp_path):
    """Two of them, with the same place, and the report says so; rankings cannot. Would not catch a third."""
    think = {"role": "assistant", "content": "<think>\nso\n</think>\n\nthat"}
    path = write(tmp_path / "a.jsonl", [{"messages": [USER, think, USER, OTHER]}, {"messages": [USER, OTHER]}])
    examples, report = read_examples([path], byte_level(QWEN3), ReadingOptions())
    assert [example.where.row for example in examples] == [0, 0, 1]
    assert report.files[0].num_records == 3 and any(note.startswith("1 rows became several") for note in report.notes)
    pair = {"prompt": [USER], "chosen": [think, USER, OTHER], "rejected": [THAT, USER, THAT]}
    with pytest.raises(ConfigError, match="template_rewrites"):
        read_rankings([write(tmp_path / "b.jsonl", [pair])], byte_level(QWEN3), ReadingOptions())


#  truncation, (ids, counts, prompt_length) of what is left of ids 0..5 with a prompt of 2 and 5 tokens at most
CUT = [
    ("right", [0, 1, 2, 3, 4], [False, False, True, False, True], 2),
    ("left", [1, 2, 3, 4, 5], [False, True, False, True, True], 1),
]
LONG = Tokens([0, 1, 2, 3, 4, 5], [False, False, True, False, True, True], 2)


@pytest.mark.parametrize(("truncation", "ids", "counts", "prompt_length"), CUT)
def test_long_texts_are_cut_by_hand(truncation, ids, counts, prompt_length):
    """Tokens, mask with a hole, prompt. Would not catch which tokens matter most."""
    options = ReadingOptions(max_length=5, truncation=truncation)
    (one,), cut, dropped = fitted([LONG], options, shares_prompt=False)
    assert (one.ids, one.counts, one.prompt_length, cut, dropped) == (ids, counts, prompt_length, 1, 0)


def test_long_texts_are_dropped_or_refused_by_hand():
    """One alone and one of a pair, with which both go. Would not catch a count of rows."""
    short = Tokens([0, 1, 2], [False, False, True], 2)
    drop = ReadingOptions(max_length=5, truncation="drop")
    assert fitted([LONG, short], drop, shares_prompt=False) == ([short], 0, 1)
    assert fitted([LONG, short], drop, shares_prompt=True) == ([], 0, 2)
    with pytest.raises(RowProblem, match="6 tokens"):
        fitted([short, LONG], ReadingOptions(max_length=5), shares_prompt=True)


texts = st.tuples(st.integers(1, 6), st.integers(1, 8))


@settings(max_examples=80, deadline=None)
@given(prompt=st.integers(1, 6), answers=st.lists(st.integers(1, 8), min_size=2, max_size=4), limit=st.integers(2, 12))
def test_answers_to_one_prompt_keep_one_prompt_when_their_start_is_cut(prompt, answers, limit):
    """Every answer whole, every text within the limit, the same end of the prompt, or refused as it cannot be.

    Would not catch a limit that is too high.
    """
    rows = [
        Tokens(list(range(prompt)) + [100 + n for n in range(k)], [False] * prompt + [True] * k, prompt)
        for k in answers
    ]
    options = ReadingOptions(max_length=limit, truncation="left")
    longest = max(answers)
    if longest >= limit and longest + prompt > limit:
        with pytest.raises(RowProblem, match="too_long"):
            fitted(rows, options, shares_prompt=True)
        return
    kept, _, _ = fitted(rows, options, shares_prompt=True)
    left = min(prompt, limit - longest)
    for one, k in zip(kept, answers, strict=True):
        assert one.ids == list(range(prompt - left, prompt)) + [100 + n for n in range(k)] and one.prompt_length == left
        assert one.counts == [False] * left + [True] * k


def test_reports_count_every_row(tmp_path):
    """4 rows: used, cut, bad; or dropped. Would not catch a row that is counted twice in one sum."""
    rows = [{"prompt": "what", "completion": " is" * n} for n in (1, 2, 30)] + [{"prompt": "what", "completion": ""}]
    path, listed = write(tmp_path / "a.jsonl", rows), str(tmp_path / "bad.jsonl")
    keys = {"max_length": 20, "bad_rows": "skip", "bad_rows_file": listed}
    cut, report = read_examples([path], TOKENIZER, ReadingOptions(truncation="right", **keys))
    assert (len(cut), report.truncated, report.dropped, len(report.bad_rows)) == (3, 1, 0, 1)
    assert len(cut[2].tokens) == 20 and report.files[0].num_rows == 4
    kept, report = read_examples([path], TOKENIZER, ReadingOptions(truncation="drop", **keys))
    assert (len(kept), report.truncated, report.dropped, len(report.bad_rows)) == (2, 0, 1, 1)
    assert any("1 rows longer than data.max_length were dropped" in line for line in report.lines())
    pairs = [
        {"prompt": "what", "chosen": " is" * 30, "rejected": " it"},
        {"prompt": "a", "chosen": " b", "rejected": " c"},
    ]
    (_,), report = read_rankings(
        [write(tmp_path / "b.jsonl", pairs)], TOKENIZER, ReadingOptions(truncation="drop", **keys)
    )
    assert report.dropped == 1
    with pytest.raises(ConfigError, match=r"none of 1 rows is left: 1 have more than data\.max_length=20"):
        read_examples([write(tmp_path / "c.jsonl", rows[2:3])], TOKENIZER, ReadingOptions(truncation="drop", **keys))


def test_the_order_of_two_files_resumes_and_refuses_other_contents(tmp_path):
    """The report's files go into the cursor of prompts. Would not catch a digest that leaves something out."""
    rows = [{"prompt": "zq", "completion": f" {n}"} for n in range(7)]
    paths = [write(tmp_path / "a.jsonl", rows[:4]), write(tmp_path / "b.parquet", rows[4:])]
    examples, report = read_examples(paths, TOKENIZER, ReadingOptions())
    assert len(examples) == 7
    cursor = MixtureCursor(report.prompt_files(), None, 3, True, 5)
    drawn = [cursor.next_indices() for _ in range(2)]
    state = json.loads(json.dumps(cursor.state_dict()))
    again = MixtureCursor(read_examples(paths, TOKENIZER, ReadingOptions())[1].prompt_files(), None, 3, True, 5)
    again.load_state_dict(state)
    drawn.append(again.next_indices())
    assert drawn[2] == cursor.next_indices() and sorted((drawn[0] + drawn[1] + drawn[2])[:7]) == list(range(7))
    whole = MixtureCursor(
        read_examples(paths, TOKENIZER, ReadingOptions(loss_on="all"))[1].prompt_files(), None, 3, True, 5
    )
    with pytest.raises(ConfigError, match="loss masks"):
        whole.load_state_dict(state)


def test_preferences_do_not_count_their_prompts(tmp_path):
    """Refused with the nearest choice. Would not catch a loss that counts them by itself."""
    with pytest.raises(ConfigError, match=r"try: data\.loss_on=answers"):
        read_rankings([], TOKENIZER, ReadingOptions(loss_on="all"))
