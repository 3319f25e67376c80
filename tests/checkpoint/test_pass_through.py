"""Carried tensors of a folder: which they are, their bytes, and what a checkpoint keeps of them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.checkpoint.pass_through import FILE, PassThroughTensors, keep_carried, kept_carried
from megatron_rl.checkpoint.weight_files import INDEX
from megatron_rl.errors import ConfigError

SETTINGS = {"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 2, "num_nextn_predict_layers": 2}
TENSORS = {
    "model.layers.1.mlp.gate.weight": torch.ones(2),
    "model.layers.2.enorm.weight": torch.tensor([1.5, float("nan"), -0.0]).bfloat16(),
    "model.layers.3.eh_proj.weight": torch.tensor([[1.0, -2.0], [448.0, 0.0]]).to(torch.float8_e4m3fn),
    "model.layers.3.empty": torch.empty(0, 4, dtype=torch.int8),
    "model.layers.4.enorm.weight": torch.ones(2),
}
CARRIED = [name for name in TENSORS if ".2." in name or ".3." in name]


@pytest.fixture
def folder(tmp_path):
    """Two layers, two that are carried, and a fifth that config.json does not name; in two files."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SETTINGS))
    files = {"a.safetensors": list(TENSORS)[:2], "b.safetensors": list(TENSORS)[2:]}
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / "model" / file)
    index = {name: file for file, names in files.items() for name in names}
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": index}))
    return tmp_path / "model"


def test_carried_tensors_are_read_as_they_are(folder):
    """Names, sizes, types, bytes. Would not catch a type that the installed torch lacks."""
    carried = PassThroughTensors.of(folder)
    assert sorted(carried.stored) == sorted(CARRIED)
    for name in CARRIED:
        tensor = carried.read(name)
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == (
            carried.dtypes[name],
            carried.shapes[name],
            carried.sizes[name],
        )
        assert tensor.dtype == TENSORS[name].dtype
        assert tensor.reshape(-1).view(torch.uint8).tolist() == TENSORS[name].reshape(-1).view(torch.uint8).tolist()


def test_a_family_without_them_reads_no_file(folder):
    """Its files may be damaged. Would not catch a family whose declaration is forgotten."""
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "b.safetensors").write_bytes(b"")
    assert PassThroughTensors.of(folder).stored == {}


def test_what_cannot_be_read_is_named(folder):
    """A file that the index names, a folder, a file that went. Would not catch bytes that changed in a live run."""
    carried = PassThroughTensors.of(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"pass-through tensors of .* cannot be read: .*b\.safetensors"):
        PassThroughTensors.of(folder)
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.eh_proj\.weight cannot be read from"):
        carried.read(CARRIED[1])
    with pytest.raises(ConfigError, match=r"cannot be read: config\.json must be a file, and it does not exist"):
        PassThroughTensors.of(folder / "elsewhere")


def test_a_type_that_torch_lacks_is_named(folder):
    """Packed to four bits. Would not catch one under a name that safetensors gives to another type."""
    header = json.dumps({"model.layers.2.x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (folder / INDEX).unlink()
    (folder / "b.safetensors").unlink()
    (folder / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.x in a\.safetensors is of type F4, which is none of F64"):
        PassThroughTensors.of(folder)


def test_a_checkpoint_keeps_their_names(folder, tmp_path):
    """They are found in the folder, or in a copy, but not in another model. Would not catch a change beyond the
    sampled bytes.
    """
    kept = tmp_path / "kept"
    kept.mkdir()
    assert kept_carried(kept).stored == {}
    assert keep_carried(folder, kept) == FILE
    assert sorted(kept_carried(kept).stored) == sorted(CARRIED)
    copy = folder.rename(tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"again from the folder that the run started from, and that is missing"):
        kept_carried(kept)
    assert sorted(kept_carried(kept, copy).stored) == sorted(CARRIED)
    save_file({CARRIED[0]: torch.zeros(3).bfloat16()} | {"other": torch.zeros(1)}, copy / "a.safetensors")
    (copy / INDEX).unlink()
    with pytest.raises(ConfigError, match=r"does not hold them as they were; export --base FOLDER names it"):
        kept_carried(kept, copy)
