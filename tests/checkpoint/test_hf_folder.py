"""Which tensor goes into which file, which rank writes it, and a whole folder written by one process."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_models import save_llama
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl.checkpoint.hf_folder import Description, file_names, plan_export, plan_files, write_hf_folder
from megatron_rl.checkpoint.hf_tensors import HFTensor, TensorPiece, put_together
from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.sharding import LogicalTensor, Segment


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), limit=st.integers(1, 50))
def test_files_hold_each_tensor_once_in_order(sizes, limit):
    """No file is too large unless one tensor is, and none could take the next. Would not catch an uneven last file."""
    named = {str(number): size for number, size in enumerate(sizes)}
    files = plan_files(named, limit)
    assert [name for file in files for name in file] == list(named)
    for file, following in zip(files, [*files[1:], None], strict=True):
        total = sum(named[name] for name in file)
        assert total <= limit or len(file) == 1
        assert following is None or total + named[following[0]] > limit


def test_names_of_files():
    """As transformers writes them. Would not catch a number of files with six digits."""
    assert file_names(1) == ["model.safetensors"]
    assert file_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_stages_write_their_own_files():
    """Two stages of ranks 0 to 3 and 4 to 7. Would not catch a rank that is slower than the others."""
    sizes = {"a": 4, "b": 4, "c": 4, "d": 4}
    holders = {"a": (0, 1), "b": (1, 0), "c": (4, 5), "d": (4,)}
    plan = plan_export(sizes, holders, 6)
    assert [(file.tensors, file.writer) for file in plan] == [(["a"], 0), (["b"], 0), (["c"], 4), (["d"], 4)]
    assert [file.ranks for file in plan] == [{0, 1}, {0, 1}, {4, 5}, {4}]
    two = plan_export(sizes, holders, 15)
    assert [(file.name, file.tensors) for file in two] == [
        ("model-00001-of-00002.safetensors", ["a", "b"]),
        ("model-00002-of-00002.safetensors", ["c", "d"]),
    ]
    [one] = plan_export(sizes, holders, 16)
    assert (one.name, one.writer, one.ranks) == ("model.safetensors", 0, {0, 1, 4, 5})


def test_pieces_must_cover_a_tensor():
    """Half of it is not enough. Would not catch a piece that comes twice in place of another."""
    tensor = HFTensor("t", "p", ParamSpec(LogicalTensor("t", (Segment("all", (4, 2), 4),), 0), ("t",)), 0)
    half = (TensorPiece(0, (slice(0, 2), slice(0, 2)), (slice(0, 2), slice(0, 2))), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="ranks hold 4 of its 8 elements"):
        put_together(tensor, [half])
    with pytest.raises(ValueError, match="ranks hold 0 of its 8 elements"):
        put_together(tensor, [])


@pytest.mark.parametrize("limit", [1 << 30, 300_000])
def test_one_process_writes_a_folder_that_transformers_reads(tmp_path, limit):
    """In one file and in many, read one by one, in another dtype. Would not catch a tokenizer that is incomplete."""
    source = tmp_path / "model"
    save_llama(source)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    target, asked = tmp_path / "copy", []

    def read(name):
        asked.append(name)
        return tensors[name]

    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "stale").touch()
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    write_hf_folder(target, sizes, read, Description(source, "LlamaForCausalLM", torch.bfloat16), limit)
    assert asked == list(tensors)
    index = target / "model.safetensors.index.json"
    files = sorted(target.glob("*.safetensors"))
    assert index.exists() == (len(files) > 1) == (limit < sum(sizes.values()))
    if index.exists():
        assert json.loads(index.read_text())["metadata"]["total_size"] == sum(sizes.values())
        assert max(file.stat().st_size for file in files) < limit + 10_000
    model = AutoModelForCausalLM.from_pretrained(target)
    assert AutoConfig.from_pretrained(target).dtype == model.dtype == torch.bfloat16
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    assert not (target / "stale").exists() and not list(tmp_path.glob("*.unfinished"))
