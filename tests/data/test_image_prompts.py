"""Prompts with images: tokens and pieces by hand, bad rows, cuts, and what a resumed run compares."""

from __future__ import annotations

import io
import json

import pyarrow
import pyarrow.parquet
import pytest
import torch
from make_image_assets import BEGIN, END, save_processor, save_tokenizer
from PIL import Image
from transformers import AutoTokenizer
from vision_folders import IMAGE, VIDEO, VISION_END, VISION_START

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.image_processor import ImageForms
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.prompt_images import PlaceholderIds, PromptImages, cut_whole
from megatron_rl.errors import ConfigError
from megatron_rl.images import ImagePiece

MARKS = PlaceholderIds(IMAGE, (IMAGE, VIDEO))


def encoded(colour: str, size: tuple[int, int] = (56, 28), kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, kind)
    return content.getvalue()


RED, BLUE = encoded("red"), encoded("blue")


def row(text, *images):
    prompt = [{"role": "user", "content": text}]
    return {"data_source": "unit", "prompt": prompt, "reward_model": {"ground_truth": "0"}, "images": list(images)}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    save_tokenizer(folder)
    save_processor(folder, 14)
    return folder


@pytest.fixture
def read(tmp_path, folder):
    """Reads rows, of parquet unless they are lines of JSON."""

    def reading(rows, most=None, sizes=(None, None), image_folder=None, is_parquet=True, **keys) -> PromptDataset:
        path = tmp_path / f"train.{'parquet' if is_parquet else 'jsonl'}"
        if is_parquet:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        images = PromptImages("images", ImageForms.of_folder(folder, *sizes, image_folder), MARKS, most)
        tokenizer, data = AutoTokenizer.from_pretrained(folder), DataConfig(image_key="images", **keys)
        try:
            return PromptDataset([str(path)], tokenizer, data, keeps_text=True, vocab_size=267, images=images)
        finally:
            images.close()

    return reading


def test_images_are_written_out_in_their_order(read, folder) -> None:
    """A row of text, one image, and two images; the tokens of the second by hand, the pieces of all."""
    data = read([row("hi"), row("a<image>", {"bytes": RED}), row("<image>b<image>", {"bytes": BLUE}, {"bytes": RED})])
    none, one, two = data.batch([0, 1, 2]).objects("images")
    assert none == () and one[0].grid == (1, 2, 4) and [len(one), len(two)] == [1, 2]
    assert two[1].digest == one[0].digest != two[0].digest
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shown = [VISION_START, IMAGE, IMAGE, VISION_END]
    text = [*tokenizer.encode(f"{BEGIN}user\na"), *shown, *tokenizer.encode(f"{END}\n{BEGIN}assistant\n")]
    ids = [row.tolist() for row in data.batch([0, 1, 2])["input_ids"].unbind()]
    assert ids[1] == text and one[0].first == text.index(IMAGE)
    for pieces, tokens in ((one, ids[1]), (two, ids[2])):
        places = [place for piece in pieces for place in range(piece.first, piece.stop)]
        assert places == [place for place, token in enumerate(tokens) if token == IMAGE]
    assert IMAGE not in ids[0]


def test_patches_are_made_again(read) -> None:
    """By digest, equal to those that the processor makes of the colour. Would not catch another size on a later day."""
    data = read([row("<image>", {"bytes": RED}), row("<image>", {"bytes": BLUE})])
    digests = [piece.digest for (piece,) in data.batch([1, 0]).objects("images")]
    blue, red = data.images.patches(digests)
    data.images.close()
    for (grid, patches), colour in ((blue, (-1.0, -1.0, 1.0)), (red, (1.0, -1.0, -1.0))):
        assert grid == (1, 2, 4) and patches.shape == (8, 3 * 2 * 14 * 14)
        assert patches.view(8, 3, -1).mean(-1).sub(torch.tensor(colour)).abs().max() < 1e-6


def test_pixels_bound_the_tokens_of_an_image(read) -> None:
    rows = [row("<image>", {"bytes": encoded("red", (280, 280))})]
    counts = [
        read(rows, sizes=sizes).batch([0]).objects("images")[0][0].num_tokens
        for sizes in ((None, None), (None, 28 * 28 * 4), (28 * 28 * 9, None))
    ]
    assert counts == [16, 4, 16]
    with pytest.raises(ConfigError, match=r"min_pixels=9999999 must be positive and at most .*max_pixels=12544"):
        read(rows, sizes=(9_999_999, None))


def test_paths_of_json_lines(read, tmp_path) -> None:
    """A path below the folder, alone and in an object; without the folder both are refused."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    rows = [row("<image>", "red.png"), row("<image>", {"path": "red.png"})]
    data = read(rows, image_folder=str(tmp_path / "pictures"), is_parquet=False)
    assert len({pieces[0].digest for pieces in data.batch([0, 1]).objects("images")}) == 1
    with pytest.raises(ConfigError, match=r"2 of 2 rows cannot be used \(2 image_outside\)"):
        read(rows, is_parquet=False)


@pytest.mark.parametrize(
    ("bad", "kind", "found"),
    [
        (row("<image><image>", {"bytes": RED}), "image_count", "2 of <image> or image parts for 1 images"),
        (row("none", {"bytes": RED}), "image_count", "0 of <image>"),
        (row("<image>", {"bytes": b"no image"}), "unreadable_image", "cannot identify"),
        (row("<image>", {"bytes": RED[:60]}), "unreadable_image", "images[0]"),
        (row("<image>" * 3, *[{"bytes": RED}] * 3), "too_many_images", "3 images, at most 2"),
        (row("<|image_pad|> and <image>", {"bytes": RED}), "image_token", "2 such tokens for 1 images"),
        (row("<|video_pad|>"), "image_token", "1 such tokens for 0 images"),
    ],
)
def test_bad_rows_are_named(read, bad, kind: str, found: str) -> None:
    """Counted by kind, with file, row and reason, whatever other rows are. Would not catch a wrong place."""
    with pytest.raises(ConfigError) as raised:
        read([row("<image>", {"bytes": RED}), bad, row("text", *[{"bytes": RED}][:0])], most=2)
    assert f"1 of 3 rows cannot be used (1 {kind})" in str(raised.value)
    assert "row 1" in str(raised.value) and found in str(raised.value)


def test_a_prompt_that_is_text_has_no_image(read) -> None:
    with pytest.raises(ConfigError, match=r"(?s)1 not_a_chat.*text with 1 images"):
        read([row("<image>", {"bytes": RED}) | {"prompt": "what"}])


@pytest.mark.parametrize(
    ("head", "tail", "kept", "places"),
    [
        (0, 7, [4, 5, 9, 9, 9, 9, 7], [2]),
        (0, 4, [7], []),
        (6, 0, [1, 2, 9, 9, 4, 5], [2]),
        (3, 2, [1, 2, 7], []),
        (9, 1, [1, 2, 9, 9, 4, 5, 7], [2]),
        (4, 7, [1, 2, 9, 9, 4, 5, 9, 9, 9, 9, 7], [2, 6]),
    ],
)
def test_a_cut_leaves_images_whole(head: int, tail: int, kept: list[int], places: list[int]) -> None:
    pieces = ImagePiece(2, "a", (1, 2, 4), 2), ImagePiece(6, "b", (1, 4, 4), 4)
    ids, shown = cut_whole([1, 2, 9, 9, 4, 5, 9, 9, 9, 9, 7], pieces, head, tail)
    assert ids == kept and [piece.first for piece in shown] == places


def test_long_prompts_with_images_are_treated_as_text(read) -> None:
    """Refused, dropped, or cut so that no image is parted."""
    rows = [row("short"), row("<image>" + "x" * 40, {"bytes": RED})]
    with pytest.raises(ConfigError, match=r"1 of 2 prompts .* are longer than data.max_prompt_length=30"):
        read(rows, max_prompt_length=30)
    assert len(read(rows, max_prompt_length=30, filter_overlong_prompts=True)) == 1
    for side, kept in (("left", 0), ("right", 1), ("middle", 1)):
        batch = read(rows, max_prompt_length=30, truncation=side).batch([1])
        (pieces,), ids = batch.objects("images"), batch["input_ids"].unbind()[0].tolist()
        assert len(pieces) == kept and ids.count(IMAGE) == 2 * kept and len(ids) <= 30


def test_a_resumed_run_compares_images(read) -> None:
    """Equal ids of other images have another digest, those of text none."""
    red, blue = (read([row("<image>", {"bytes": content})]).files[0].digests for content in (RED, BLUE))
    assert red["tokens"] == blue["tokens"] and red["images"] != blue["images"]


def test_a_folder_that_reads_no_images_is_named(tmp_path, folder) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    with pytest.raises(ConfigError, match="the image processor of .* is CLIPImageProcessor"):
        ImageForms.of_folder(folder, None, None, None)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="has no preprocessor_config.json"):
        ImageForms.of_folder(folder, None, None, None)
    save_processor(folder, 14)
    with pytest.raises(ConfigError, match="data.image_folder=/nowhere must be a folder"):
        ImageForms.of_folder(folder, None, None, "/nowhere")
