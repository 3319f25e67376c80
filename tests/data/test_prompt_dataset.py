"""Reading and checking prompt files, with the demo's tokenizer: four special tokens, then "0" is 4 and "9" is 13."""

import importlib.util
import json
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.prompt_dataset import PromptDataset, untemplated_notes
from megatron_rl.data.reading import read_examples
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.data.row_files import column_forms
from megatron_rl.errors import ConfigError
from megatron_rl.records import repeated

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_demo_assets.py"


@pytest.fixture(scope="module")
def tokenizer():
    spec = importlib.util.spec_from_file_location("make_demo_assets", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.make_tokenizer()


def chat(text):
    return [{"role": "user", "content": text}]


def row(prompt, truth="0", **extra):
    return {"data_source": "unit", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}, **extra}


@pytest.fixture
def write(tmp_path):
    def write_rows(rows):
        path = tmp_path / "train.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return str(path)

    return write_rows


def test_batch_holds_tokens_and_what_the_reward_needs(write, tokenizer):
    """Rows in the order asked for, ids by hand. Would not catch a template that needs the generation prompt."""
    path = write([row(chat("0"), "a", extra_info={"k": 1}), row(chat("12+"), "b", extra_info={"k": 2})])
    dataset = PromptDataset([path], tokenizer, DataConfig())
    batch = dataset.batch([1, 0, 1])
    assert len(dataset) == 2
    assert [ids.tolist() for ids in batch["input_ids"].unbind()] == [[5, 6, 14], [4], [5, 6, 14]]
    assert batch["index"].tolist() == [1, 0, 1] and batch["sample"].tolist() == [0, 0, 0]
    assert batch.objects("data_source") == ["unit"] * 3 and batch.objects("ground_truth") == ["b", "a", "b"]
    assert batch.objects("extra_info") == [{"k": 2}, {"k": 1}, {"k": 2}]


def test_plain_strings_are_encoded_as_they_are(write, tokenizer):
    """No template, no extra_info column. Would not catch a lost BOS: this tokenizer adds none."""
    batch = PromptDataset([write([row("90")])], tokenizer, DataConfig()).batch([0])
    assert batch["input_ids"].unbind()[0].tolist() == [13, 4]
    assert batch.objects("extra_info") == [{}]


def test_generation_prompt_is_added(write, tokenizer):
    """The template is told to open the answer. Would not catch special tokens added twice by other tokenizers."""
    before = tokenizer.chat_template
    tokenizer.chat_template = before + "{% if add_generation_prompt %}={% endif %}"
    try:
        batch = PromptDataset([write([row(chat("1"))])], tokenizer, DataConfig()).batch([0])
    finally:
        tokenizer.chat_template = before
    assert batch["input_ids"].unbind()[0].tolist() == [5, 15]


def test_overlong_prompts_are_an_error_or_dropped(write, tokenizer):
    """A dropped row leaves the others' row numbers alone. Would not catch a wrong limit for strings."""
    path = write([row(chat("1")), row(chat("12345")), row(chat("123"))])
    with pytest.raises(ConfigError, match=r"1 of 3 .*max_prompt_length=3; the longest has 5 tokens \(row 1\)"):
        PromptDataset([path], tokenizer, DataConfig(max_prompt_length=3))
    dataset = PromptDataset([path], tokenizer, DataConfig(max_prompt_length=3, filter_overlong_prompts=True))
    assert len(dataset) == 2
    assert dataset.batch([0, 1])["index"].tolist() == [0, 2]
    with pytest.raises(ConfigError, match="none is left; the shortest has 1 tokens"):
        PromptDataset([path], tokenizer, DataConfig(max_prompt_length=0, filter_overlong_prompts=True))


def test_a_token_that_the_model_lacks_is_named(write, tokenizer):
    """ "9" is token 13. Would not catch a token that the template alone writes for an answer."""
    path = write([row("12"), row("190")])
    with pytest.raises(ConfigError, match="row 1, field 'prompt': token 13, and the model has 13; .*: take the"):
        PromptDataset([path], tokenizer, DataConfig(), vocab_size=13)
    assert len(PromptDataset([path], tokenizer, DataConfig(), vocab_size=14)) == 2


def test_missing_file_names_its_neighbour(write, tokenizer):
    """Would not catch a folder given in place of a file that holds parquet files."""
    path = write([row(chat("1"))])
    with pytest.raises(ConfigError, match=r"trian.parquet is no file; did you mean: .*train\.parquet"):
        PromptDataset([path.replace("train", "trian")], tokenizer, DataConfig())


def test_missing_column_lists_columns_and_nearest(write, tokenizer):
    """Would not catch a column of the wrong type."""
    path = write([row(chat("1"))])
    with pytest.raises(
        ConfigError, match=r"'prompts' \(data.prompt_key\).*data_source, prompt, .*did you mean: prompt$"
    ):
        PromptDataset([path], tokenizer, DataConfig(prompt_key="prompts"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("1"), row(None)], "row 1, field 'prompt': nothing; the row has data_source, reward_model"),
        ([row("1"), row("")], "row 1, field 'prompt': 0 tokens; a prompt must not be empty"),
        ([row(7)], "row 0, field 'prompt': 7, and not text or messages"),
        (
            [row(chat("1")), row([{"role": "user", "content": None}])],
            r"row 1, field 'prompt\[0\].content': no content; a message must be .* with role and content",
        ),
        ([row("1"), row("2", truth=None)], "row 1, field 'reward_model.ground_truth': nothing; the row has"),
        (
            [{**row("1"), "reward_model": {"style": "rule"}}],
            "no column .reward_model.ground_truth. .data.ground_truth_key.",
        ),
    ],
)
def test_bad_rows_are_named(write, tokenizer, rows, message):
    """Would not catch a message of a role that the template does not know."""
    with pytest.raises(ConfigError, match=message):
        PromptDataset([write(rows)], tokenizer, DataConfig())


def test_empty_and_unreadable_files(tmp_path, tokenizer):
    """Would not catch damage inside a file that is otherwise whole."""
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row("1")]).slice(0, 0), path)
    with pytest.raises(ConfigError, match="holds 0 rows"):
        PromptDataset([str(path)], tokenizer, DataConfig())
    path.write_text("prompt\n1+1=\n")
    with pytest.raises(ConfigError, match="not a readable parquet file"):
        PromptDataset([str(path)], tokenizer, DataConfig())


def test_chat_prompts_need_a_template_that_accepts_them(write, tokenizer):
    """Would not catch a template that accepts a prompt and mangles it."""
    path, before = write([row(chat("1"))]), tokenizer.chat_template
    try:
        tokenizer.chat_template = None
        with pytest.raises(ConfigError, match="no chat_template"):
            PromptDataset([path], tokenizer, DataConfig())
        tokenizer.chat_template = "{% if messages[0].content == '2' %}{{ raise_exception('no twos') }}{% endif %}1"
        path = write([row(chat("1")), row(chat("2")), row(chat("3"))])
        with pytest.raises(
            ConfigError, match=r"train.parquet: row 1, field 'prompt': no twos; the tokenizer's chat_template must"
        ):
            PromptDataset([path], tokenizer, DataConfig())
    finally:
        tokenizer.chat_template = before


def test_damaged_parquet_names_file_and_row(tmp_path, tokenizer):
    """The third of three row groups is overwritten. Would not catch damage to a file written without checksums."""
    path = tmp_path / "train.parquet"
    table = pyarrow.Table.from_pylist([row(f"{number}") for number in range(3000)])
    pyarrow.parquet.write_table(table, path, row_group_size=1024, write_page_checksum=True)
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(1).data_page_offset
    content = bytearray(path.read_bytes())
    content[start + 60 : start + 80] = b"\xff" * 20
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"train\.parquet is damaged somewhere from row 2048 on \(of 3000\)"):
        PromptDataset([str(path)], tokenizer, DataConfig())
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"train\.parquet is not a readable parquet file"):
        PromptDataset([str(path)], tokenizer, DataConfig())


def write_lines(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_json_lines_are_read_like_parquet(tmp_path, write, tokenizer):
    """The same rows in both; a blank line is skipped. Would not catch a number that JSON cannot hold."""
    rows = [row(chat("0"), "a", extra_info={"k": 1}), row("12+", "b", extra_info={"k": 2}), row(chat("1"), 7)]
    lines = write_lines(tmp_path / "train.jsonl", rows[0], "", *rows[1:])
    batch = PromptDataset([lines], tokenizer, DataConfig()).batch([0, 1, 2])
    assert [ids.tolist() for ids in batch["input_ids"].unbind()] == [[4], [5, 6, 14], [5]]
    assert batch.objects("ground_truth") == ["a", "b", 7] and batch.objects("extra_info") == [{"k": 1}, {"k": 2}, {}]
    parquet = PromptDataset([write(rows[:1])], tokenizer, DataConfig())
    assert (
        parquet.files[0].digests
        == PromptDataset([write_lines(tmp_path / "a.jsonl", rows[0])], tokenizer, DataConfig()).files[0].digests
    )


@pytest.mark.parametrize(
    ("column", "changes"),
    [
        ("tokens", {"prompt": "2"}),
        ("data sources", {"data_source": "other"}),
        ("ground truths", {"reward_model": {"ground_truth": "b"}}),
        ("extra_info", {"extra_info": {"k": 1}}),
    ],
)
def test_each_column_has_a_digest_of_its_own(tmp_path, tokenizer, column, changes):
    """One value changed in one column that a run reads. Would not catch a column that it begins to read."""
    both = [row("1", "a"), row("1", "a") | changes]
    paths = [write_lines(tmp_path / f"{number}.jsonl", line) for number, line in enumerate(both)]
    ours, theirs = (PromptDataset([path], tokenizer, DataConfig()).files[0].digests for path in paths)
    assert [name for name in ours if ours[name] != theirs[name]] == [column]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"prompt": "\\ud800"}',
            r"line 3, field 'prompt': '.ud800'; text must not hold half of a surrogate pair",
        ),
        ("[" * 100_000, r"line 3: nested more deeply than can be read"),
        (
            {**row("1"), "extra_info": {"a": json.loads("[" * 99 + "]" * 99)}},
            r"line 3: nested more deeply than can be read",
        ),
        ('{"prompt": "1", ', "line 3: Expecting property name .* at character 16 of the line; a line must be JSON"),
        ("[1]", r"line 3: a list; a line must be an object in braces"),
        (
            {"prompt": "1", "data_source": "unit"},
            r"line 3, field 'reward_model.ground_truth': nothing; the row has prompt, data_source",
        ),
        (
            {**row("1"), "reward_model": "2"},
            r"line 3, field 'reward_model.ground_truth': nothing; the row has data_source",
        ),
        (
            {**row("1"), "images": [1, 2]},
            "field 'images': 2 entries; a row must be text, and images where data.image_key names their column",
        ),
        ({**row("1"), "extra_info": [1]}, "field 'extra_info': a list, and not an object"),
        ({**row("1"), "prompt": {"role": "user"}}, "field 'prompt': {'role': 'user'}, and not text or messages"),
    ],
)
def test_bad_lines_are_named(tmp_path, tokenizer, line, message):
    """Would not catch two objects on one line that happen to be one valid object."""
    path = write_lines(tmp_path / "train.jsonl", row("1"), "", line)
    with pytest.raises(ConfigError, match=rf"1 of 2 rows cannot be used (?s:.*)train\.jsonl.*{message}"):
        PromptDataset([path], tokenizer, DataConfig())


def test_several_files_are_laid_end_to_end(tmp_path, write, tokenizer):
    """Row numbers go on, filtered rows included. Would not catch files in another order than given."""
    first = write([row(chat("1")), row(chat("12345"))])
    second = write_lines(tmp_path / "b.jsonl", row("2"), row("3"))
    config = DataConfig(max_prompt_length=3, filter_overlong_prompts=True)
    dataset = PromptDataset([first, second], tokenizer, config)
    assert [file.num_prompts for file in dataset.files] == [1, 2]
    assert dataset.batch([0, 1, 2])["index"].tolist() == [0, 2, 3]
    assert dataset.data_sources == {"unit"}


@pytest.mark.parametrize(
    ("truncation", "ids"), [("left", [6, 7, 8]), ("right", [4, 5, 6]), ("middle", [4, 7, 8]), ("error", None)]
)
def test_overlong_prompts_are_cut_as_asked(write, tokenizer, truncation, ids):
    """Five tokens into three, and a short prompt left alone. Would not catch a template's end that is cut off."""
    path, config = write([row("01234"), row("9")]), DataConfig(max_prompt_length=3, truncation=truncation)
    if ids is None:
        with pytest.raises(ConfigError, match="data.truncation=left, right or middle"):
            PromptDataset([path], tokenizer, config)
    else:
        batch = PromptDataset([path], tokenizer, config).batch([0, 1])
        assert [row.tolist() for row in batch["input_ids"].unbind()] == [ids, [13]]


def test_template_arguments_and_source_column(write, tokenizer):
    """A keyword reaches the template. Would not catch a keyword the template ignores."""
    path, before = write([row(chat("1"), topic="sums")]), tokenizer.chat_template
    tokenizer.chat_template = before + "{% if plus %}+{% endif %}"
    try:
        config = DataConfig(apply_chat_template_kwargs={"plus": True}, reward_fn_key="topic")
        batch = PromptDataset([path], tokenizer, config).batch([0])
    finally:
        tokenizer.chat_template = before
    assert batch["input_ids"].unbind()[0].tolist() == [5, 14] and batch.objects("data_source") == ["sums"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_without_a_rule_no_ground_truth_is_needed(tmp_path, write, tokenizer, suffix):
    """No column, and a row that has one all the same. Would not catch a rule that is asked without a truth."""
    for rows, truths in (
        ([{"data_source": "chat", "prompt": "1"}], [None]),
        ([row("1", "7"), {**row("2"), "reward_model": None}], ["7", None]),
    ):
        path = write(rows) if suffix == "parquet" else str(tmp_path / "train.jsonl")
        if suffix == "jsonl":
            Path(path).write_text("".join(json.dumps(content) + "\n" for content in rows))
        dataset = PromptDataset([path], tokenizer, DataConfig(), is_judged=False)
        twice = repeated(dataset.batch(range(len(rows))), 2)
        assert twice.objects("ground_truth") == [t for t in truths for _ in range(2)]
        with pytest.raises(ConfigError, match="reward_model"):
            PromptDataset([path], tokenizer, DataConfig())


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_field_that_is_there_twice_is_refused(tmp_path, tokenizer, suffix):
    """Two columns, two fields inside of one, and the same in JSON; of a plan, of prompts and of examples.

    Would not catch two names that differ in capitals alone.
    """
    file = tmp_path / f"twice.{suffix}"
    for where in ("prompt", "reward_model.ground_truth"):
        if suffix == "jsonl":
            inner = '{"ground_truth": "1"' + (', "ground_truth": "2"}' if "." in where else "}")
            fields = '"prompt": "1", ' + ("" if "." in where else '"prompt": "2", ')
            file.write_text("{" + fields + f'"data_source": "u", "reward_model": {inner}' + "}\n")
            said = f"field '{where.split('.')[-1]}': named twice; an object must name each field once"
        else:
            names = ["ground_truth", "ground_truth" if "." in where else "style"]
            truth = pyarrow.StructArray.from_arrays([pyarrow.array(["1"]), pyarrow.array(["2"])], names)
            columns = [pyarrow.array([text]) for text in ("1", "2", "u")]
            head = ["prompt", "other" if "." in where else "prompt", "data_source"]
            pyarrow.parquet.write_table(pyarrow.table([*columns, truth], names=[*head, "reward_model"]), file)
            said = f"two columns named '{where}'"
        for read in (
            lambda: column_forms(str(file), first_row_only=True),
            lambda: PromptDataset([str(file)], tokenizer, DataConfig()),
        ):
            with pytest.raises(ConfigError, match=said):
                read()
        if suffix == "parquet":
            with pytest.raises(ConfigError, match=said):
                read_examples([str(file)], tokenizer, ReadingOptions(response_key="data_source"))


FLAT = [{"question": str(number), "answer": f"is {number}", "meta": {"gold": number}} for number in range(8)]
OWN_KEYS = {"prompt_key": "question", "ground_truth_key": "answer", "default_data_source": "mine"}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("keys", "is_judged", "truth", "source"),
    [
        ({}, True, "is 3", "mine"),
        ({"ground_truth_key": "meta.gold"}, True, 3, "mine"),
        ({"ground_truth_key": None}, True, None, "mine"),
        ({"reward_fn_key": "answer"}, True, "is 3", "is 3"),
        ({"ground_truth_key": "no", "default_data_source": None}, False, None, "train"),
    ],
)
def test_a_flat_file_needs_no_converter(tmp_path, write, tokenizer, suffix, keys, is_judged, truth, source):
    """Columns by keys, a source for all rows, and the file's name for answers that nothing scores.

    Would not catch a struct whose field is missing in some rows.
    """
    path = write(FLAT) if suffix == "parquet" else str(write_lines(tmp_path / "train.jsonl", *FLAT))
    data = PromptDataset([path], tokenizer, DataConfig(**OWN_KEYS | keys), is_judged)
    batch = data.batch([3])
    assert (batch.objects("ground_truth"), batch.objects("data_source")) == ([truth], [source])
    assert data.are_chats == {False}
    if is_judged and "ground_truth_key" not in keys:
        with pytest.raises(ConfigError, match="'reward_model.ground_truth' .*; did you mean: answer"):
            PromptDataset([path], tokenizer, DataConfig(prompt_key="question", default_data_source="mine"))


def test_a_text_goes_through_the_template_where_asked(tmp_path, tokenizer):
    """As the message of a user, and without a template the key that asked is named. Would not catch turns."""
    path = str(write_lines(tmp_path / "train.jsonl", *FLAT))
    plain, sent = (DataConfig(**OWN_KEYS, prompt_as_chat=is_chat) for is_chat in (None, True))
    batch = PromptDataset([path], tokenizer, sent, keeps_text=True).batch([2])
    assert batch.objects("raw_prompt") == [chat("2")] and batch["input_ids"].unbind()[0].tolist() == [6]
    (note,) = untemplated_notes({False}, tokenizer, plain)
    assert "data.prompt_as_chat=true" in note
    assert not untemplated_notes({False}, tokenizer, sent) and not untemplated_notes({True}, tokenizer, plain)
    before, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        assert not untemplated_notes({False}, tokenizer, plain)
        with pytest.raises(ConfigError, match="no chat_template: add one .*, or set data.prompt_as_chat=false"):
            PromptDataset([path], tokenizer, sent)
    finally:
        tokenizer.chat_template = before


def test_some_rows_of_all_files_are_used(tmp_path, tokenizer):
    """The first ones, or with shuffle those that numpy draws of all files together; they keep their numbers. Rows that
    are left out are not looked at. Sets and digests of the order decide whether a run may resume.

    Would not catch another generator in a later verl.
    """
    first, second = (
        str(write_lines(tmp_path / name, *FLAT[:5], {"question": None})) for name in ("a.jsonl", "b.jsonl")
    )
    in_order = DataConfig(**OWN_KEYS, shuffle=False)
    data = PromptDataset([first], tokenizer, in_order, max_samples=5)
    assert data.batch(range(5))["index"].tolist() == [0, 1, 2, 3, 4]
    assert [file.num_prompts for file in data.files] == [5]
    with pytest.raises(ConfigError, match="1 of 6 rows.*(?s:.*)line 6,"):
        PromptDataset([first, second], tokenizer, in_order, max_samples=7)
    seed = next(n for n in range(99) if not {5, 11} & {*numpy.random.default_rng(n).choice(12, 6, replace=False)})
    data = PromptDataset([first, second], tokenizer, DataConfig(**OWN_KEYS, seed=seed), max_samples=6)
    drawn = sorted(numpy.random.default_rng(seed).choice(12, size=6, replace=False).tolist())
    assert data.batch(range(6))["index"].tolist() == drawn and sum(file.num_prompts for file in data.files) == 6
    assert [row["ground_truth"] for row in data.rows] == [FLAT[number % 6]["answer"] for number in drawn]
    options = ReadingOptions(prompt_key="question", max_samples=6, seed=seed)
    examples, report = read_examples([first, second], tokenizer, options)
    assert [example.where.row for example in examples] == [number % 6 for number in drawn]
    assert sum(file.num_rows for file in report.files) == 6
    other = PromptDataset([first], tokenizer, DataConfig(**OWN_KEYS, shuffle=False), max_samples=4)
    assert other.files[0].digests != PromptDataset([first], tokenizer, in_order, max_samples=5).files[0].digests
