"""What tells one model from another of the same shapes: cheap, and the same for a copy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from megatron_rl.checkpoint.identity import (
    SAMPLED_TENSORS,
    computed_settings,
    folder_identity,
    unlike_the_list,
)
from megatron_rl.checkpoint.model_folder import ModelFolder, end_tokens
from megatron_rl.model.families import FAMILIES, text_settings
from megatron_rl.planning.folder_files import FolderFiles

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_hidden_layers": 2}


def tensors(number: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"model.layers.{n}.w": torch.randn(3, 2000, generator=generator) for n in range(number)}


def folder_of(folder: Path, *parts: dict[str, torch.Tensor], **settings) -> Path:
    """A folder with a file of weights for each of `parts`, and an index where there are several."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | settings))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    for number, part in enumerate(parts):
        save_file(part, folder / f"part-{number}.safetensors")
    if len(parts) > 1:
        index = {name: f"part-{number}.safetensors" for number, part in enumerate(parts) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def identity(folder: Path) -> dict:
    return folder_identity(ModelFolder(folder))


def test_a_copy_in_other_files_is_the_same(tmp_path):
    """One file and three. Would not catch two folders that differ in what is not sampled."""
    whole = tensors()
    split = [{name: whole[name] for name in list(whole)[part::3]} for part in range(3)]
    one, three = identity(folder_of(tmp_path / "one", whole)), identity(folder_of(tmp_path / "three", *split))
    assert one == three and len(one["weights"]) == 12
    assert json.loads(json.dumps(one)) == one


@pytest.mark.parametrize("change", ["values", "name", "shape", "type"])
def test_other_weights_are_noticed(tmp_path, change):
    """As a training step changes them, or one tensor alone. Would not catch a single changed element."""
    other = tensors()
    first = next(iter(other))
    if change == "values":
        other[first] = other[first] + 1e-3
    elif change == "name":
        other["renamed"] = other.pop(first)
    elif change == "shape":
        other[first] = other[first].view(2, 3000)
    else:
        other[first] = other[first].view(torch.int32)
    ours, theirs = folder_of(tmp_path / "ours", tensors()), folder_of(tmp_path / "theirs", other)
    assert {key for key, value in identity(ours).items() if identity(theirs)[key] != value} == {"weights"}


def test_of_many_tensors_all_kinds_are_sampled(tmp_path):
    """Every ninth of 9 * 200 tensors is changed, as if one matrix of each layer. Would not catch one layer alone."""
    ours = {f"model.layers.{layer}.{kind}": torch.zeros(4) for layer in range(200) for kind in "abcdefghi"}
    assert len(ours) > SAMPLED_TENSORS
    theirs = {name: tensor + (name[-1] == "e") for name, tensor in ours.items()}
    found = [identity(folder_of(tmp_path / name, part))["weights"] for name, part in (("a", ours), ("b", theirs))]
    assert found[0] != found[1]


def test_what_cannot_be_read_is_left_out(tmp_path):
    """Then it is not compared. Would not catch a reader that takes half a file."""
    folder = folder_of(tmp_path / "model", tensors())
    content = (folder / "part-0.safetensors").read_bytes()
    (folder / "part-0.safetensors").write_bytes(content[:-1])
    (folder / "tokenizer.json").unlink()
    assert identity(folder).keys() == computed_settings(LLAMA).keys() | {"eos_token_id"}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_is_left_out_has_the_librarys_value(tmp_path, architecture):
    """transformers' own reading of the same config.json. Would not catch a default that a later version changes."""
    settings = {"architectures": [architecture], "num_local_experts": 8, "num_experts": 8, "num_hidden_layers": 2}
    settings |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "intermediate_size": 8}
    settings |= {"shared_expert_intermediate_size": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    kind = FAMILIES[architecture].model_type
    if (inside := FAMILIES[architecture].inside) is not None:
        settings = {"architectures": [architecture], inside.key: settings}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": kind}))
    settings = text_settings(settings)
    read, found = AutoConfig.from_pretrained(tmp_path).get_text_config(), computed_settings(settings)
    assert found["rms_norm_eps"] == read.rms_norm_eps
    if "full_attention" in read.rope_parameters:
        kinds = ("full_attention", "sliding_attention")
        assert found["rope_scaling"] == {kind: read.rope_parameters[kind] for kind in kinds}
    else:
        assert found["rope_theta"] == read.rope_parameters["rope_theta"]
        spelling = ("rope_type", "rope_theta", "partial_rotary_factor")
        scaling = {name: value for name, value in read.rope_parameters.items() if name not in spelling}
        assert found["rope_type"] == read.rope_parameters["rope_type"] and found["rope_scaling"] == scaling
    declared = getattr(read, "eos_token_id", None)
    assert end_tokens(tmp_path, settings) == (None if declared is None else [declared])
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert computed_settings(text_settings(json.loads((tmp_path / "config.json").read_text()))) == found


def listing(folder: Path) -> None:
    """Write down the digests of all files, as `sha256sum * > SHA256SUMS`."""
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(lines))


def test_a_changed_file_of_the_list_is_refused(tmp_path):
    """One bit inside of a large tensor, where no block is looked at; a file that the list lacks, and one that is gone.
    The same bit is not seen without a list. Would not catch a list that is changed with the file.
    """
    folder = folder_of(tmp_path / "model", tensors(1))
    assert unlike_the_list(folder) == []
    before = identity(folder)
    listing(folder)
    digest = hashlib.sha256((folder / "part-0.safetensors").read_bytes()).hexdigest()
    assert unlike_the_list(folder) == [] and identity(folder) == before | {
        "weight files": {"part-0.safetensors": digest}
    }
    assert FolderFiles.read(ModelFolder(folder)).faults == []
    data = bytearray((folder / "part-0.safetensors").read_bytes())
    data[-100] ^= 1
    (folder / "part-0.safetensors").write_bytes(data)
    changed = hashlib.sha256(data).hexdigest()
    rule = f"part-0.safetensors has the SHA-256 {changed[:12]}..., and SHA256SUMS says {digest[:12]}...: copy it again"
    assert unlike_the_list(folder) == FolderFiles.read(ModelFolder(folder)).faults == [rule]
    assert identity(folder)["weights"] == before["weights"]
    save_file({"more": torch.zeros(1)}, folder / "more.safetensors")
    (folder / "tokenizer.json").unlink()
    assert unlike_the_list(folder) == [
        "SHA256SUMS does not list more.safetensors",
        "tokenizer.json of SHA256SUMS is missing",
        rule,
    ]
