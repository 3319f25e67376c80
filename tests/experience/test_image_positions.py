"""Positions of tokens in time, height and width: by hand, and those of transformers and vLLM."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.experience.block_layout import BlockLayout
from megatron_rl.experience.image_positions import BlockImages, ImageMarks, image_positions
from megatron_rl.model.families.vision import axes_of_angles

IMAGE, START, END = 9, 7, 8
MARKS = ImageMarks(IMAGE, merge=2)


def test_positions_by_hand() -> None:
    """An image of 2 x 3 tokens and one of 1 x 1 in the first conversation, text in the second."""
    tokens = torch.tensor([1, 7, 9, 9, 9, 9, 9, 9, 8, 9, 2, 1, 2])
    grids = torch.tensor([[1, 4, 6], [1, 2, 2]])
    found = image_positions(tokens, torch.tensor([11, 2]), grids, MARKS)
    time = [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 0, 1]
    height = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 0, 1]
    width = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 0, 1]
    assert found.tolist() == [time, height, width]
    with pytest.raises(ValueError, match=r"7 image tokens for images of \[6\] tokens"):
        image_positions(tokens, torch.tensor([13]), grids[:1], MARKS)


def random_row(rng: random.Random) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Tokens and grids of a row of text and up to five images."""
    tokens, grids = [], []
    for _ in range(rng.randrange(6)):
        tokens += [rng.randrange(6) for _ in range(rng.randrange(9))]
        grids.append((1, 2 * rng.randint(1, 10), 2 * rng.randint(1, 10)))
        tokens += [START, *[IMAGE] * (grids[-1][1] * grids[-1][2] // 4), END]
    return tokens + [rng.randrange(6) for _ in range(1 + rng.randrange(9))], grids


def ours(tokens: list[int], grids: list[tuple[int, int, int]]) -> torch.Tensor:
    """The function's positions of one row."""
    table = torch.tensor(grids, dtype=torch.int64).view(-1, 3)
    return image_positions(torch.tensor(tokens), torch.tensor([len(tokens)]), table, MARKS)


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL", "Qwen3_5"])
def test_positions_are_those_of_transformers(name) -> None:
    """1,000 rows; and none is beyond the token's place in its row. Would not catch videos."""
    import transformers

    model_class, rng = getattr(transformers, f"{name}Model"), random.Random(0)
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2))
    theirs = SimpleNamespace(config=config)
    theirs.get_vision_position_ids = model_class.get_vision_position_ids.__get__(theirs)
    for _ in range(1000):
        tokens, grids = random_row(rng)
        ids = torch.tensor([tokens])
        table = torch.tensor(grids) if grids else None
        expected, _ = model_class.get_rope_index(theirs, ids, (ids == IMAGE).int(), image_grid_thw=table)
        found = ours(tokens, grids)
        assert torch.equal(found, expected[:, 0])
        assert (found <= torch.arange(len(tokens))).all()


@pytest.mark.exhaustive
def test_positions_are_those_of_vllm() -> None:
    """200 rows with images, by Qwen2.5-VL's rule and by Qwen3-VL's. Would not catch how the engine calls them."""
    from third_party_patches.vllm import without_torchvision

    without_torchvision.apply()
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    marks = {"video_token_id": 6, "vision_start_token_id": START, "vision_end_token_id": END}
    engine, rng = SimpleNamespace(config=SimpleNamespace(vision_config=vision, **marks)), random.Random(1)
    for _ in range(200):
        tokens, grids = random_row(rng)
        if not grids:
            continue
        features, place = [], -1
        for grid in grids:
            place = tokens.index(START, place + 1)
            data = {"image_grid_thw": SimpleNamespace(data=torch.tensor(grid))}
            where = SimpleNamespace(offset=place + 1, length=grid[1] * grid[2] // 4)
            features.append(SimpleNamespace(modality="image", data=data, mm_position=where))
        for name, model_class in (("2.5", Qwen2_5_VLForConditionalGeneration), ("3", Qwen3VLForConditionalGeneration)):
            engine.iter_mm_grid_thw = getattr(model_class, "iter_mm_grid_thw", lambda features: None).__get__(engine)
            if name == "2.5":
                found, _ = model_class.get_mrope_input_positions(engine, tokens, features)
            else:
                found, _ = model_class._get_mrope_input_positions(tokens, features, engine.config)
            assert torch.equal(found, ours(tokens, grids)), name


def test_axes_of_angles() -> None:
    """Sections one after the other; and in turn, as long as height and width have some left."""
    assert axes_of_angles((2, 1, 1), alternating=False, num_angles=4) == (0, 0, 1, 2)
    assert axes_of_angles((4, 2, 2), alternating=True, num_angles=8) == (0, 1, 2, 0, 1, 2, 0, 0)
    assert axes_of_angles((3, 3, 2), alternating=True, num_angles=8) == (0, 1, 2, 0, 1, 2, 0, 1)


def test_images_lie_where_their_tokens_do() -> None:
    """Two rows of one prompt that is stored once: its image has one place, and each token its row's position."""
    prompt = [1, IMAGE, IMAGE, 3]
    tokens = torch.tensor([*prompt, 4, *prompt, 5, 6])
    grids = torch.tensor([[1, 2, 4]] * 2)
    rows = (torch.zeros(len(tokens), dtype=torch.bool), torch.tensor([5, 6]))
    layout = BlockLayout(*rows, remove_padding=True, column_multiple=4, prefixes=((0, 0), (0, 3)))
    images = BlockImages.laid(tokens, grids, None, MARKS, layout)
    assert images.numbers.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]
    assert images.positions[2].tolist() == [[0, 1, 2, 3, 4, 3, 4, 5]]
    padded = BlockImages.laid(tokens, grids, None, MARKS, BlockLayout(*rows, remove_padding=False))
    assert padded.numbers.tolist() == [[0, 1, 2, 0, 0, 0], [0, 3, 4, 0, 0, 0]]
    assert padded.widened(1, 1).numbers.tolist() == [[0, 1, 2, 0, 0, 0, 0], [0, 3, 4, 0, 0, 0, 0], [0] * 7]
    assert padded.part(torch.tensor([0, 2])).numbers.tolist() == [[0, 2], [0, 4]]
    assert BlockImages.laid(tokens[:1], grids[:0], None, MARKS, layout) is None
