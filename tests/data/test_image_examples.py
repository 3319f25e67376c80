"""Examples with images: tokens, masks and pieces of every schema, cuts, bad rows, and what a resumed run compares."""

from __future__ import annotations

import pyarrow
import pyarrow.parquet
import pytest
from make_image_assets import save_processor, save_tokenizer
from test_image_prompts import BLUE, MARKS, RED
from transformers import AutoTokenizer
from vision_folders import IMAGE, VISION_END

from megatron_rl.data.image_processor import ImageForms
from megatron_rl.data.prompt_images import PromptImages
from megatron_rl.data.reading import read_examples, read_labelled, read_rankings, read_scored, token_batch
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.errors import ConfigError
from megatron_rl.tasks.training_records import mismatched, preference_batch


@pytest.fixture
def read(tmp_path):
    """Reads rows with one of the readers."""
    folder = tmp_path / "model"
    save_tokenizer(folder)
    save_processor(folder, 14)

    def reading(reader, rows, **options):
        path = tmp_path / "train.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        images = PromptImages("images", ImageForms.of_folder(folder, None, None, None), MARKS, None)
        try:
            return reader([str(path)], AutoTokenizer.from_pretrained(folder), ReadingOptions(**options), images)
        finally:
            images.close()

    return reading


def said(role, content) -> dict:
    return {"role": role, "content": content}


def turns(images=(RED, BLUE)) -> dict:
    """Two questions with an image each: the first of 2 tokens, the second, too."""
    messages = [said("user", "<image>a"), said("assistant", "red"), said("user", "b<image>"), said("assistant", "blue")]
    return {"messages": messages, "images": [{"bytes": image} for image in images]}


def test_every_turn_counts_and_no_placeholder_does(read, tmp_path) -> None:
    """Of two turns with an image before each, also where the prompts are learned. Would not catch a template that
    writes an image in another place than its part.
    """
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    (example,), report = read(read_examples, [turns()])
    ids, (first, second) = example.tokens, example.images
    assert [first.num_tokens, second.num_tokens] == [2, 2] and first.digest != second.digest
    for piece in (first, second):
        assert ids[piece.first : piece.stop].tolist() == [IMAGE] * 2 and ids[piece.stop] == VISION_END
    assert tokenizer.decode(ids[example.loss_mask]) == "red<|im_end|>blue<|im_end|>"
    assert tokenizer.decode(ids[: example.prompt_length]).endswith("assistant\n") and report.num_tokens == len(ids)
    assert token_batch([example]).objects("images") == [example.images]
    (whole,), _ = read(read_examples, [turns()], loss_on="all")
    assert whole.loss_mask.sum() == len(ids) - 1 - 4 and not whole.loss_mask[ids == IMAGE].any()
    (one,), _ = read(read_examples, [turns()], loss_on="last")
    assert len(one.images) == 2 and tokenizer.decode(one.tokens[one.loss_mask]) == "blue<|im_end|>"


def test_a_prompt_s_images_are_those_of_each_response(read) -> None:
    """Pairs, rankings, labels and scores, and the batch of two answers. Would not catch prompts that are mixed up."""
    question = [said("user", [{"type": "image", "text": None}, {"type": "text", "text": "?"}])]
    shown = {"prompt": question, "images": [{"bytes": RED}]}
    (pair,), _ = read(read_rankings, [shown | {"chosen": "red", "rejected": "blue"}])
    better, worse = pair.answers
    assert len(better.images) == 1 and better.images == worse.images
    assert better.tokens[: pair.prompt_length].tolist() == worse.tokens[: pair.prompt_length].tolist()
    batch = preference_batch([pair])
    assert batch.objects("images") == [(*better.images, *worse.images)]
    assert batch["answer_images"].values().tolist() == [1, 1]
    (ranked,), _ = read(read_rankings, [shown | {"answers": ["red", "blue", "no"]}])
    assert [answer.images for answer in ranked.answers] == [better.images] * 3
    (scored,), _ = read(read_scored, [shown | {"completion": [said("assistant", "red")], "score": 0.5}])
    assert scored.example.images == better.images
    other = shown | {"images": [{"bytes": BLUE}]}
    answer = {"completion": [said("assistant", "red")], "label": True}
    labelled, _ = read(read_labelled, [shown | answer, other | answer])
    assert labelled[0].example.tokens.tolist() == labelled[1].example.tokens.tolist()
    assert [row.example.images for row in mismatched(labelled, 64)] == [row.example.images for row in labelled]


@pytest.mark.parametrize(
    ("truncation", "length", "num_images"), [("right", 12, 0), ("right", 30, 1), ("left", 17, 0), ("left", 40, 1)]
)
def test_a_cut_leaves_an_image_out_as_a_whole(read, truncation, length, num_images) -> None:
    """Would not catch a row that is longer than it may be, which the other cuts' tests do."""
    rows = [turns()]
    try:
        (example,), report = read(read_examples, rows, truncation=truncation, max_length=length)
    except ConfigError as error:
        assert num_images == 0 and "nothing_counted" in str(error)
        return
    assert report.truncated == 1 and len(example.tokens) <= length and len(example.images) == num_images
    assert int((example.tokens == IMAGE).sum()) == 2 * num_images
    assert all((example.tokens[piece.first : piece.stop] == IMAGE).all() for piece in example.images)


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        (turns((RED,)), "image_count", "2 of <image> or image parts for 1 images"),
        (turns((RED, RED[:60])), "unreadable_image", r"images\[1\]"),
        (
            turns() | {"messages": [said("user", "a<image>"), said("assistant", "<image>")]},
            "image_in_answer",
            "<image>",
        ),
        ({"messages": turns()["messages"], "images": [{"bytes": RED}, {"bytes": b""}]}, "not_an_image", r"images\[1\]"),
    ],
)
def test_bad_rows_are_named_and_can_be_skipped(read, tmp_path, row, kind, reason) -> None:
    """Next to a row that can be used. Would not catch a limit that stops the whole run."""
    with pytest.raises(ConfigError, match=f"(?s){kind}.*{reason}"):
        read(read_examples, [turns(), row])
    listed = tmp_path / "bad.jsonl"
    examples, report = read(read_examples, [turns(), row], bad_rows="skip", bad_rows_file=str(listed))
    assert len(examples) == 1 and [bad.kind for bad in report.bad_rows] == [kind]
    assert kind in listed.read_text() and report.files[0].num_rows == 2


def test_a_resumed_run_compares_images(read) -> None:
    """Equal tokens of other images, and text, whose digests have no such entry. Would not catch other loss masks."""
    digests = [read(read_examples, [turns(images)])[1].files[0].digests for images in ((RED, BLUE), (BLUE, RED))]
    assert digests[0]["images"] != digests[1]["images"] and digests[0]["tokens"] == digests[1]["tokens"]
    text = {"messages": [said("user", "a"), said("assistant", "b")], "images": []}
    assert "images" not in read(read_examples, [text])[1].files[0].digests


def test_files_without_the_column_are_refused(read) -> None:
    """With the nearest name. Would not catch a file that has it under a struct."""
    row = turns()
    with pytest.raises(ConfigError, match=r"no column 'images' \(data\.image_key\).*did you mean: image"):
        read(read_examples, [{"messages": row["messages"], "image": row["images"]}])
