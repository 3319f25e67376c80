"""Tensors that training reads and leaves as they are: from a folder, beside a checkpoint, and back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint.constants import FILE, constants_of, keep_constants, load_constants, read_constants
from megatron_rl.checkpoint.hf_import import HFFolder
from megatron_rl.errors import ConfigError

SETTINGS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "kv_lora_rank": 8,
    "moe_intermediate_size": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "q_lora_rank": None,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "vocab_size": 10,
}
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """Layers 1 and 2 have experts, whose biases are bfloat16 and float32."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SETTINGS))
    biases = [torch.tensor([0.5, -1.25, 3.0, 8.0]).bfloat16(), torch.tensor([0.1, 0.2, 0.3, 0.4])]
    tensors = {f"model.layers.{n + 1}.mlp.gate.e_score_correction_bias": bias for n, bias in enumerate(biases)}
    save_file(tensors | {"another": torch.zeros(2)}, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def test_constants_go_through_a_checkpoint_as_they_are(folder, tmp_path):
    """Bits and dtypes. Would not catch a tensor that a family forgets to name."""
    (tmp_path / "kept").mkdir()
    assert keep_constants(folder, tmp_path / "kept") == FILE
    kept, original = load_file(tmp_path / "kept" / FILE), load_file(folder / "model.safetensors")
    assert kept.keys() == original.keys() - {"another"}
    for constants in (kept, read_constants(constants_of(SETTINGS).values(), tmp_path / "kept", CPU, dtype=None)):
        for name, tensor in constants.items():
            assert tensor.dtype == original[name].dtype and torch.equal(tensor, original[name])


def test_a_stage_reads_its_own_in_float32(folder):
    """By Megatron's names. Would not catch a buffer that a later version renames."""
    buffers = {"decoder.layers.2.mlp.router.correction_bias": torch.zeros(4), "other": torch.zeros(1)}
    load_constants(buffers, constants_of(SETTINGS), HFFolder(folder))
    assert buffers["decoder.layers.2.mlp.router.correction_bias"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert buffers["other"].tolist() == [0.0]


def test_a_folder_without_them_is_named(folder, tmp_path):
    """A family without constants needs none. Would not catch a wrong value."""
    save_file({"another": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="layers.1.mlp.gate.e_score_correction_bias' is not in "):
        keep_constants(folder, tmp_path)
    llama = {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(llama))
    assert keep_constants(folder, tmp_path) is None and read_constants([], folder, CPU) == {}
