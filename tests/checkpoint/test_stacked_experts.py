"""Experts that a folder has in stacks, transposed, with biases, or in 4 bits: read in any layout, and put back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_import import HFFolder, read_part
from megatron_rl.checkpoint.hf_tensors import hf_tensors, pieces, put_together
from megatron_rl.checkpoint.mxfp4 import unpacked
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import FAMILIES, ModelShape, param_map
from megatron_rl.parallel.sharding import Place, box_index, shard_of

EXPERTS, HIDDEN, COLUMNS = 4, 32, 96
SHAPE = ModelShape(1, HIDDEN, 2, 2, 2, COLUMNS, 70, tied=False, num_experts=EXPERTS)
SPECS = {name: spec for name, spec in param_map(FAMILIES["GptOssForCausalLM"], SHAPE).items() if ".experts." in name}
BLOCK = "model.layers.0.mlp.experts."


def stacks() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "gate_up_proj": (EXPERTS, HIDDEN, 2 * COLUMNS),
        "gate_up_proj_bias": (EXPERTS, 2 * COLUMNS),
        "down_proj": (EXPERTS, COLUMNS, HIDDEN),
        "down_proj_bias": (EXPERTS, HIDDEN),
    }
    return {BLOCK + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def read(folder: HFFolder, name: str, place: Place) -> torch.Tensor:
    shard = shard_of(SPECS[name].tensor, place)
    into = torch.zeros(shard.shape)
    for part in shard.parts:
        read_part(folder, SPECS[name], part.segment, part.box, into[part.index])
    return into


def test_stacks_are_cut_as_vllm_cuts_them_and_put_back(tmp_path) -> None:
    """EP2 x ETP2: one rank by hand, and every tensor to the byte. Would not catch gate in the place of up."""
    tensors = stacks()
    save_file(tensors, tmp_path / "model.safetensors")
    folder = HFFolder(tmp_path)
    places = {rank: Place(0, 1, 64, ep_rank=rank // 2, ep_size=2, etp_rank=rank % 2, etp_size=2) for rank in range(4)}
    loaded = {name: {rank: read(folder, name, place) for rank, place in places.items()} for name in SPECS}
    mine = {name.rpartition(".")[2]: shards[3] for name, shards in loaded.items()}
    assert torch.equal(mine["w13"], tensors[f"{BLOCK}gate_up_proj"][2:, :, COLUMNS:].transpose(1, 2))
    assert torch.equal(mine["w13_bias"], tensors[f"{BLOCK}gate_up_proj_bias"][2:, COLUMNS:])
    assert torch.equal(mine["w2"], tensors[f"{BLOCK}down_proj"][2:, COLUMNS // 2 :].transpose(1, 2))
    first, second = (loaded["decoder.layers.0.mlp.experts.w2_bias"][rank] for rank in (2, 3))
    assert torch.equal(first, tensors[f"{BLOCK}down_proj_bias"][2:]) and not second.any() and len(second) == 2
    for tensor in hf_tensors(SPECS):
        parts = pieces(tensor, places, places)
        data = ((part, tensor.as_in_folder(loaded[tensor.parameter][part.rank][part.source])) for part in parts)
        assert torch.equal(put_together(tensor, data), tensors[tensor.name])


def random_codes(rows: int, columns: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, and exponents from 2^-27 to 2^20."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(100, 148, blocks.shape[:-1], generator=generator, dtype=torch.uint8)


def test_codes_mean_what_transformers_makes_of_them() -> None:
    """Equal to the bit, in float32 and in bfloat16. Would not catch an exponent for which neither has a number."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = random_codes(64, 96)
    for dtype in (torch.float32, torch.bfloat16):
        expected = convert_moe_packed_tensors(*codes, dtype=dtype).transpose(1, 2)
        assert torch.equal(unpacked(*codes).to(dtype), expected)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_boxes_of_codes(data, tmp_path_factory) -> None:
    """Any box is that of the whole tensor, also within 32 columns. Would not catch two tensors of one name."""
    path = tmp_path_factory.mktemp("codes")
    blocks, scales = random_codes(HIDDEN, COLUMNS)
    save_file({f"{BLOCK}down_proj_blocks": blocks, f"{BLOCK}down_proj_scales": scales}, path / "model.safetensors")
    folder, shape = HFFolder(path), (EXPERTS, HIDDEN, COLUMNS)
    edges = [sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in shape]
    box = tuple((low, high) for low, high in edges)
    into = torch.empty([high - low for low, high in box])
    read_part(folder, SPECS["decoder.layers.0.mlp.experts.w2"], 0, box, into)
    assert torch.equal(into, unpacked(blocks, scales)[box_index(box)])


def test_codes_that_are_no_numbers_are_refused(tmp_path) -> None:
    """An exponent of 255, which stands for NaN; and codes whose scales are missing."""
    blocks, scales = random_codes(HIDDEN, COLUMNS)
    scales[1, 2, 0] = 255
    file, names = tmp_path / "model.safetensors", (f"{BLOCK}down_proj_blocks", f"{BLOCK}down_proj_scales")
    save_file(dict(zip(names, (blocks, scales), strict=True)), file)
    with pytest.raises(ConfigError, match=r"down_proj .*cannot be used: a number is infinite"):
        read(HFFolder(tmp_path), "decoder.layers.0.mlp.experts.w2", Place(0, 1, 64))
    save_file({names[0]: blocks}, file)
    with pytest.raises(ConfigError, match=r"down_proj_scales' is not in"):
        read(HFFolder(tmp_path), "decoder.layers.0.mlp.experts.w2", Place(0, 1, 64))
