"""What is read as what, from the columns of a file or by the keys; what could mean two things is refused."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from small_tokenizers import byte_level

from megatron_rl.data.reading import read_examples
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.data.row_files import column_forms
from megatron_rl.data.schemas import CANDIDATES, NEEDED, OPTIONAL, SHAPES, find_columns
from megatron_rl.errors import ConfigError

CHAT = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "that"}]
TEXT, MESSAGES = "text", "messages"

#  task, forms of the columns, keys, shape, names, words of the schema
FOUND = [
    ("examples", {"messages": MESSAGES, "id": TEXT}, {}, "conversation", {"messages": "messages"}, "conversations"),
    (
        "examples",
        {"messages": MESSAGES, "prompt": TEXT, "tools": TEXT},
        {},
        "conversation",
        {"messages": "messages", "tools": "tools"},
        "conversations",
    ),
    (
        "examples",
        {"prompt": TEXT, "completion": TEXT},
        {},
        "answer",
        {"prompt": "prompt", "response": "completion"},
        "TRL's prompt-completion",
    ),
    (
        "examples",
        {"question": TEXT, "answer": TEXT},
        {},
        "answer",
        {"prompt": "question", "response": "answer"},
        "verl's schema",
    ),
    (
        "examples",
        {"prompt": MESSAGES, "extra_info": "struct", "extra_info.answer": TEXT},
        {"response_key": "extra_info.answer"},
        "answer",
        {"prompt": "prompt", "response": "extra_info.answer"},
        "verl's schema",
    ),
    ("examples", {"text": TEXT}, {}, "text", {"text": "text"}, "plain text"),
    ("examples", {"body": TEXT, "messages": MESSAGES}, {"text_key": "body"}, "text", {"text": "body"}, "plain text"),
    (
        "rankings",
        {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT},
        {},
        "pair",
        {"chosen": "chosen", "rejected": "rejected", "prompt": "prompt"},
        "prompt in a column",
    ),
    (
        "rankings",
        {"chosen": MESSAGES, "rejected": MESSAGES, "margin": "number"},
        {},
        "pair",
        {"chosen": "chosen", "rejected": "rejected", "margin": "margin"},
        "prompt in both answers",
    ),
    (
        "rankings",
        {"prompt": TEXT, "responses": "texts", "scores": "numbers"},
        {},
        "ranking",
        {"answers": "responses", "prompt": "prompt", "scores": "scores"},
        "by their scores",
    ),
    (
        "rankings",
        {"prompt": TEXT, "answers": "texts", "ranks": "numbers", "scores": "numbers"},
        {"ranks_key": "ranks", "margin_key": "scores"},
        "ranking",
        {"answers": "answers", "prompt": "prompt", "ranks": "ranks", "margin": "scores"},
        "by their ranks",
    ),
    (
        "labelled",
        {"prompt": TEXT, "completion": TEXT, "label": "boolean"},
        {},
        "answer",
        {"prompt": "prompt", "response": "completion", "label": "label"},
        "TRL's unpaired preference",
    ),
    (
        "labelled",
        {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT},
        {},
        "pair",
        {"chosen": "chosen", "rejected": "rejected", "prompt": "prompt"},
        "TRL's preference",
    ),
    (
        "scored",
        {"prompt": TEXT, "response": TEXT, "reward": "number"},
        {},
        "answer",
        {"prompt": "prompt", "response": "response", "score": "reward"},
        "with scores",
    ),
]


@pytest.mark.parametrize(("task", "forms", "keys", "shape", "names", "words"), FOUND)
def test_columns_are_found(task, forms, keys, shape, names, words):
    """Shape, columns and the words of each schema. Would not catch a column whose later rows have another form."""
    columns = find_columns("data", forms, ReadingOptions(**keys), task)
    assert (columns.shape, columns.names) == (shape, names)
    assert words in str(columns) and all(f"{use}={name}" in str(columns) for use, name in names.items())


#  task, forms of the columns, keys, what the error says
REFUSED = [
    (
        "examples",
        {"prompt": TEXT, "response": TEXT, "answer": TEXT},
        {},
        r"response and answer could both be the response: set data\.response_key=response or data\.response_key=answer",
    ),
    (
        "examples",
        {"messages": MESSAGES, "prompt": TEXT, "response": TEXT},
        {},
        r"can be read in 2 ways.*set data\.messages_key=messages, or data\.prompt_key=prompt data\.response_key=resp",
    ),
    (
        "examples",
        {"prompt": TEXT},
        {},
        r"has no columns for this: it has prompt \(text\), and needs messages; or prompt or",
    ),
    ("examples", {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT}, {}, r"set data\.response_key=chosen"),
    ("examples", {"conversations": "turns"}, {}, r"turns of \{from, value\} must be messages of \{role, content\}"),
    (
        "examples",
        {"prompt": TEXT, "response": TEXT},
        {"response_key": "respons"},
        r"no column 'respons'.*did you mean: resp",
    ),
    ("rankings", {"prompt": TEXT, "response": TEXT}, {}, r"needs chosen with rejected; or answers or responses"),
    (
        "rankings",
        {"prompt": TEXT, "answers": "texts", "ranks": "numbers", "scores": "numbers"},
        {},
        "they could differ",
    ),
    ("labelled", {"prompt": TEXT, "completion": TEXT}, {}, r"completion or response or answer with label"),
    ("scored", {"prompt": TEXT, "response": TEXT}, {}, r"data\.score_key"),
]


@pytest.mark.parametrize(("task", "forms", "keys", "error"), REFUSED)
def test_what_is_ambiguous_or_missing_is_refused_with_the_key(task, forms, keys, error):
    """The columns there are and the keys to set. Would not catch two meanings of one column."""
    with pytest.raises(ConfigError, match=error):
        find_columns("data", forms, ReadingOptions(**keys), task)


def test_tables_agree():
    """Every use of every shape has candidates and a key. Would not catch a candidate that is missing."""
    uses = {use for shape in NEEDED for use in (*NEEDED[shape], *OPTIONAL[shape])}
    assert uses | {"label", "score"} == set(CANDIDATES)
    assert all(hasattr(ReadingOptions(), f"{use}_key") for use in CANDIDATES)
    assert {shape for shapes in SHAPES.values() for shape in shapes} == set(NEEDED) == set(OPTIONAL)


def test_parquet_and_jsonl_say_the_same(tmp_path):
    """Forms from types and from values, of structs too. Would not catch types that arrow has and JSON has not."""
    row = {
        "t": "a",
        "n": 1.5,
        "i": 2,
        "b": True,
        "m": CHAT,
        "ts": ["a"],
        "ns": [1],
        "c": [CHAT],
        "from": [{"from": "gpt", "value": "a"}],
        "s": {"x": "a", "y": {"z": 1}},
        "other": [{"k": 1}],
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    # Nothing is known from nulls, and one row of another form is a bad row, not another column.
    other, good = json.dumps(dict.fromkeys(row) | {"t": 1, "m": "what"}), json.dumps(row)
    (tmp_path / "a.jsonl").write_text(f"{other}\nnot JSON\n{good}\n{good}\n")
    expected = {"t": "text", "n": "number", "i": "number", "b": "boolean", "m": "messages", "ts": "texts"}
    expected |= {"ns": "numbers", "c": "conversations", "from": "turns", "s": "struct", "s.x": "text", "s.y": "struct"}
    expected |= {"s.y.z": "number", "other": "other"}
    assert column_forms(str(tmp_path / "a.parquet")) == expected == column_forms(str(tmp_path / "a.jsonl"))


def test_files_of_different_schemas_are_refused(tmp_path):
    """Both files and both schemas are named. Would not catch the same columns with other meanings."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.parquet"
    one.write_text(json.dumps({"messages": CHAT}))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "what", "response": "that"}]), two)
    with pytest.raises(ConfigError) as refused:
        read_examples([str(one), str(two)], byte_level(), ReadingOptions())
    assert all(text in str(refused.value) for text in (str(one), str(two), "messages=messages", "response=response"))


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"truncation": "middle"}, r"data\.truncation=middle must be one of error, left, right, drop"),
        ({"bad_rows": "ignore"}, r"data\.bad_rows=ignore must be one of error, skip"),
        ({"loss_on": "answer"}, r"data\.loss_on=answer .*did you mean: answers"),
        ({"max_length": 1}, r"data\.max_length=1 must be >= 2; try: 2"),
        ({"bad_rows": "skip"}, r"needs data\.bad_rows_file"),
    ],
)
def test_options_without_meaning_are_refused(keys, error):
    """With what would be right. Would not catch two options that contradict each other."""
    with pytest.raises(ConfigError, match=error):
        ReadingOptions(**keys)
