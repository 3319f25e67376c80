"""Every kind of bad row is named with file, row, line, field, rule and what to do; none is dropped silently."""

from __future__ import annotations

import json
import re

import pyarrow
import pyarrow.parquet
import pytest
from small_tokenizers import CHATML, FORGETFUL, STRICT, byte_level

from megatron_rl.data.messages import check_answers
from megatron_rl.data.reading import read_examples, read_labelled, read_rankings, read_scored
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.data.row_problems import KINDS
from megatron_rl.errors import ConfigError

READERS = {"sft": read_examples, "pairs": read_rankings, "labels": read_labelled, "scores": read_scored}
USER, ANSWER = {"role": "user", "content": "what"}, {"role": "assistant", "content": "that"}
GOOD = {
    "messages": {"messages": [USER, ANSWER]},
    "answer": {"prompt": "what", "response": "that"},
    "pair": {"prompt": "what", "chosen": "that", "rejected": "the other"},
    "margin": {"prompt": "what", "chosen": "that", "rejected": "the other", "margin": 1.0},
    "whole": {"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "no"}]},
    "ranking": {"prompt": "what", "answers": ["that", "no"], "scores": [2, 1]},
    "label": {"prompt": "what", "completion": "that", "label": True},
    "score": {"prompt": "what", "response": "that", "score": 0.5},
    "tools": {"messages": [USER, ANSWER], "tools": "[]"},
}


def chat(*messages):
    return {"messages": list(messages)}


#  kind, reader, the good rows around it, the bad row (bytes of a line, or an object), field
OF_IMAGES = {"not_an_image", "image_count", "unreadable_image", "image_size", "image_outside", "too_many_images"}
OF_IMAGES |= {"image_token", "image_in_answer", "not_a_chat"}
"""Kinds of rows with images: test_hostile_images.py, test_image_prompts.py."""
CASES = [
    ("not_json", "sft", "messages", b'{"messages": [', ""),
    ("not_json", "sft", "messages", b"[" * 100_000, ""),
    ("not_json", "sft", "answer", b'{"prompt": "what", "response": ' + b"[" * 200 + b"]" * 200 + b"}", ""),
    ("not_an_object", "sft", "messages", b'["messages"]', ""),
    ("not_utf8", "sft", "answer", b'{"prompt": "caf\xe9", "response": "that"}', ""),
    ("half_surrogate", "sft", "answer", b'{"prompt": "\\ud83d", "response": "that"}', "prompt"),
    ("repeated_field", "sft", "answer", b'{"prompt": "a", "prompt": "b", "response": "c"}', "prompt"),
    ("missing", "sft", "answer", {"prompt": "what"}, "response"),
    ("missing", "sft", "answer", {"prompt": None, "response": "that"}, "prompt"),
    ("wrong_type", "sft", "answer", {"prompt": 7, "response": "that"}, "prompt"),
    ("wrong_type", "sft", "answer", {"prompt": "what", "response": {"no": 1}.__len__()}, "response"),
    ("wrong_type", "sft", "messages", {"messages": "what"}, "messages"),
    ("wrong_type", "sft", "tools", {"messages": [USER, ANSWER], "tools": "{add}"}, "tools"),
    ("wrong_type", "sft", "tools", {"messages": [USER, ANSWER], "tools": "[" * 100_000}, "tools"),
    ("wrong_type", "pairs", "whole", {"chosen": [USER, ANSWER], "rejected": "no"}, "rejected"),
    ("empty_prompt", "sft", "answer", {"prompt": " ", "response": "that"}, "prompt"),
    ("empty_prompt", "sft", "messages", chat({"role": "user", "content": ""}, ANSWER), "messages[0].content"),
    ("empty_answer", "sft", "answer", {"prompt": "what", "response": ""}, "response"),
    ("empty_answer", "sft", "messages", chat(USER, {"role": "assistant", "content": " "}), "messages[1].content"),
    ("empty_answer", "pairs", "pair", {"prompt": "what", "chosen": "", "rejected": "no"}, "chosen"),
    ("no_messages", "sft", "messages", {"messages": []}, "messages"),
    ("not_a_message", "sft", "messages", {"messages": [USER, "that"]}, "messages[1]"),
    ("not_a_message", "sft", "messages", chat(USER, {"from": "gpt", "value": "that"}), "messages[1].role"),
    ("not_a_message", "sft", "messages", chat(USER, {"role": "assistant"}), "messages[1].content"),
    ("unknown_role", "sft", "messages", chat({"role": "human", "content": "what"}, ANSWER), "messages[0].role"),
    (
        "content_not_text",
        "sft",
        "messages",
        chat({"role": "user", "content": [{"type": "image"}]}, ANSWER),
        "messages[0].content[0]",
    ),
    ("not_text", "sft", "answer", {"prompt": "what", "response": "that", "images": [{"path": "a.png"}]}, "images"),
    ("misplaced_system", "sft", "messages", chat(USER, {"role": "system", "content": "so"}, ANSWER), "messages[1]"),
    ("stray_tool_message", "sft", "messages", chat(USER, {"role": "tool", "content": "4"}, ANSWER), "messages[1]"),
    ("no_question", "sft", "messages", chat(ANSWER), "messages[0]"),
    ("unanswered", "sft", "messages", chat(USER, ANSWER, USER), "messages[2]"),
    (
        "no_shared_prompt",
        "pairs",
        "whole",
        {"chosen": [USER, ANSWER], "rejected": [{"role": "user", "content": "who"}, ANSWER]},
        "chosen",
    ),
    ("same_answers", "pairs", "pair", {"prompt": "what", "chosen": "no", "rejected": "no"}, "chosen and rejected"),
    ("same_answers", "pairs", "whole", {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "chosen and rejected"),
    ("too_few_answers", "pairs", "ranking", {"prompt": "what", "answers": ["that"], "scores": [1]}, "answers"),
    ("unequal_counts", "pairs", "ranking", {"prompt": "what", "answers": ["that", "no"], "scores": [1]}, "scores"),
    ("tie", "pairs", "ranking", {"prompt": "what", "answers": ["that", "no"], "scores": [1, 1]}, "scores"),
    ("not_a_label", "labels", "label", {"prompt": "what", "completion": "that", "label": "true"}, "label"),
    ("not_a_number", "scores", "score", b'{"prompt": "what", "response": "that", "score": NaN}', "score"),
    ("not_a_number", "scores", "score", {"prompt": "what", "response": "that", "score": "high"}, "score"),
    ("not_a_number", "scores", "score", {"prompt": "what", "response": "that", "score": True}, "score"),
    ("negative_margin", "pairs", "margin", GOOD["margin"] | {"margin": -1.0}, "margin"),
    ("template_refuses", "sft", "strict", chat({"role": "system", "content": "so"}, USER, ANSWER), ""),
    ("template_rewrites", "sft", "forgetful", chat(USER, ANSWER), "messages[1]"),
    ("too_long", "sft", "answer", {"prompt": "zq" * 100, "response": "that"}, ""),
]
TEMPLATES = {"strict": STRICT, "forgetful": FORGETFUL}
MENDED = {"forgetful": chat(USER, {"role": "assistant", "content": "</think>"})}


def written(path, good, bad):
    """Two good rows, a blank line, the bad row as row 2 on line 4, one more good row."""
    lines = [json.dumps(good).encode()] * 2 + [b"", bad if isinstance(bad, bytes) else json.dumps(bad).encode()]
    path.write_bytes(b"\n".join([*lines, json.dumps(good).encode()]) + b"\n")
    return str(path)


@pytest.mark.parametrize(
    ("kind", "reader", "around", "bad", "field"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)]
)
def test_each_kind_is_named_and_can_be_skipped(kind, reader, around, bad, field, tmp_path):
    """The error names file, row, line, field, kind and remedy; with `bad_rows=skip` the other rows are read and the
    list holds the same. Would not catch a kind that a template raises only for some answers.
    """
    tokenizer = byte_level(TEMPLATES.get(around, CHATML))
    path = written(tmp_path / "data.jsonl", GOOD.get(around, GOOD["messages"]), bad)
    read = READERS[reader]
    if around == "forgetful":  # this template does so with every row
        with pytest.raises(ConfigError, match=r"4 of 4 rows cannot be used \(4 template_rewrites\)"):
            read([path], tokenizer, ReadingOptions())
        return
    options = {"max_length": 200}
    with pytest.raises(ConfigError) as refused:
        read([path], tokenizer, ReadingOptions(**options))
    message = str(refused.value)
    named = f"{path}: line 4" + (f", field {field!r}: " if field else ": ")
    rule, remedy = KINDS[kind]
    assert named in message and f"{rule}: {remedy} [{kind}]" in message
    assert message.startswith(f"1 of 4 rows cannot be used (1 {kind})") and "data.bad_rows=skip" in message
    listed = tmp_path / "bad" / "rows.jsonl"
    skipping = ReadingOptions(**options, bad_rows="skip", bad_rows_file=str(listed))
    records, report = read([path], tokenizer, skipping)
    assert len(records) == 3 == report.files[0].num_records and report.files[0].num_rows == 4
    (line,) = [json.loads(line) for line in listed.read_text().splitlines()]
    assert (line["file"], line["row"], line["line"]) == (path, 2, 4)
    assert (line["field"], line["kind"], line["remedy"]) == (field, kind, remedy)
    assert any(f"1 bad rows were skipped (data.bad_rows=skip): 1 {kind}" in line for line in report.lines())


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_an_answer_may_be_a_thought_alone(field):
    """Under each name that a thought may have. Would not catch a thought that the template leaves out."""
    check_answers([USER, ANSWER | {"content": "", field: "well"}], "messages")


def test_the_table_has_every_kind():
    """At least 20 of them, all above or in a test of their own below. Would not catch a kind that is named wrongly."""
    others = {"nothing_counted", "unknown_token", *OF_IMAGES}
    assert {case[0] for case in CASES} | others == set(KINDS) and len(KINDS) >= 20


def test_tokens_that_the_model_lacks_are_named(tmp_path):
    """ "that" is made of bytes below 117; a model of 100 tokens has no "t". Would not catch a hole among its tokens."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(GOOD["answer"]) + "\n")
    with pytest.raises(ConfigError, match=r"line 1: .*and the model has 60; every token.*\[unknown_token\]"):
        read_examples([str(path)], byte_level(), ReadingOptions(vocab_size=60))
    assert len(read_examples([str(path)], byte_level(), ReadingOptions(vocab_size=1000))[0]) == 1


def test_nothing_left_that_counts(tmp_path):
    """A prompt that fills all of `max_length` when the end is cut off. Would not catch an answer cut in half."""
    bad = {"prompt": "zq" * 100, "response": "that"}
    path = written(tmp_path / "data.jsonl", GOOD["answer"], bad)
    with pytest.raises(ConfigError, match=r"line 4: none of 200 tokens.*data.truncation=left.*nothing_counted"):
        read_examples([path], byte_level(), ReadingOptions(max_length=200, truncation="right"))


def test_a_template_that_writes_nothing(tmp_path):
    """No token at all: a bad row, as nothing counts. Would not catch one that leaves out answers alone."""
    path = written(tmp_path / "data.jsonl", GOOD["messages"], GOOD["messages"])
    with pytest.raises(ConfigError, match=r"4 of 4 rows cannot be used \(4 nothing_counted\)"):
        read_examples([path], byte_level("{% set a = 1 %}"), ReadingOptions(append_eos=False))


def test_bad_rows_of_parquet(tmp_path):
    """Null, and text that is not UTF-8, which arrow only notices when it is taken out: named by row and field.

    Would not catch damage to pages, which is the file's.
    """
    texts = pyarrow.array([b"that", None, b"caf\xe9", b"no"], pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(4, texts.buffers()[1], texts.buffers()[2], texts.buffers()[0], 1)
    table = pyarrow.table({"prompt": ["what"] * 4, "response": texts})
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(ConfigError) as refused:
        read_examples([str(path)], byte_level(), ReadingOptions())
    message = str(refused.value)
    assert message.startswith("2 of 4 rows cannot be used (1 missing, 1 not_utf8)")
    assert f"{path}: row 1, field 'response': nothing" in message
    assert f"{path}: row 2, field 'response': byte 0xe9 at 3" in message


def test_many_bad_rows_are_counted_and_the_first_listed(tmp_path):
    """Two files, 30 bad rows of two kinds, in order, and one of each kind among them. Would not catch a list that
    leaves out the last."""
    paths = []
    for name in ("a", "b"):
        rows = [GOOD["answer"]] + [{"prompt": "", "response": "that"}] * 10 + [{"prompt": "what"}] * 5
        paths.append(str(tmp_path / f"{name}.jsonl"))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError) as refused:
        read_examples(paths, byte_level(), ReadingOptions())
    message = str(refused.value)
    assert message.startswith("30 of 32 rows cannot be used (20 empty_prompt, 10 missing)")
    assert message.count("\n") == 11 and message.endswith("and 20 more")
    assert [line.count("[empty_prompt]") for line in message.splitlines()[1:]] == [1] * 9 + [0, 0]
    assert "a.jsonl: line 12, field 'response'" in message.splitlines()[10]
    listed = tmp_path / "bad.jsonl"
    _, report = read_examples(paths, byte_level(), ReadingOptions(bad_rows="skip", bad_rows_file=str(listed)))
    assert len(listed.read_text().splitlines()) == 30 == len(report.bad_rows)
    assert [one.num_records for one in report.files] == [1, 1]


def test_only_bad_rows_end_the_run_even_where_they_are_skipped(tmp_path):
    """Nothing would be left: they are listed all the same, and skipping is not recommended. Would not catch one good
    row among thousands."""
    path, listed = tmp_path / "data.jsonl", tmp_path / "bad"
    path.write_text('{"prompt": "what", "response": ""}\n')
    with pytest.raises(ConfigError, match=r"1 of 1 rows cannot be used \(1 empty_answer\): correct them\n"):
        read_examples([str(path)], byte_level(), ReadingOptions(bad_rows="skip", bad_rows_file=str(listed)))
    assert json.loads(listed.read_text())["kind"] == "empty_answer"


#  name, bytes (None: nothing there; "folder"), what the error says
FILES = [
    ("none.jsonl", None, r"none\.jsonl is no file; did you mean: .*good\.jsonl"),
    ("folder.jsonl", "folder", "is a folder"),
    ("data.json", b"[]", r"must end in \.parquet or in \.jsonl"),
    ("empty.jsonl", b"\n\n", "holds 0 rows"),
    ("wide.jsonl", "what".encode("utf-16"), "is UTF-16; it must be UTF-8: iconv"),
    ("packed.jsonl", b"\x1f\x8b\x08\x00", "is compressed: unpack it"),
    ("named.jsonl", b"PAR1PAR1", r"is a parquet file: call it \.parquet"),
    ("torn.parquet", b"PAR1torn", "is not a readable parquet file"),
    ("all_bad.jsonl", b"no\nnor this\n", r"2 of 2 rows cannot be used \(2 not_json\)"),
]


@pytest.mark.parametrize(("name", "content", "error"), FILES, ids=[case[0] for case in FILES])
def test_files_that_cannot_be_read(name, content, error, tmp_path):
    """Refused with the reason and what to do, skipping or not. Would not catch a disk that fails half-way."""
    (tmp_path / "good.jsonl").write_text(json.dumps(GOOD["answer"]))
    if content == "folder":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    for options in (ReadingOptions(), ReadingOptions(bad_rows="skip", bad_rows_file=str(tmp_path / "bad"))):
        with pytest.raises(ConfigError, match=error) as refused:
            read_examples([str(tmp_path / name)], byte_level(), options)
        assert re.search(re.escape(str(tmp_path / name)), str(refused.value))


def test_damage_in_the_middle_of_a_parquet_file(tmp_path):
    """Pages with checksums. Would not catch damage that a file without them hides."""
    table = pyarrow.table({"prompt": [f"what {n}" for n in range(5000)], "response": ["that"] * 5000})
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[2000] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match="is damaged somewhere from row 0 on"):
        read_examples([str(path)], byte_level(), ReadingOptions())


def test_parquet_without_the_columns(tmp_path):
    """The columns there are, and those that are looked for. Would not catch a column of the right name alone."""
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["what"], "reply": ["that"]}), path)
    with pytest.raises(ConfigError, match=r"it has prompt \(text\), reply \(text\), and needs messages; or prompt or"):
        read_examples([str(path)], byte_level(), ReadingOptions())
    assert len(read_examples([str(path)], byte_level(), ReadingOptions(response_key="reply"))[0]) == 1


def test_a_mark_of_utf8_is_no_part_of_the_first_line(tmp_path):
    """As editors write it. Would not catch one in the middle of a file."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD["answer"]).encode())
    assert len(read_examples([str(path)], byte_level(), ReadingOptions())[0]) == 1
