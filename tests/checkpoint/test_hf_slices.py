"""Reading TP shards from Hugging Face folders, and putting them together again, on small random tensors."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_export import fused_sizes, unfuse
from megatron_rl.checkpoint.hf_import import HFFolder, global_name, load_hf_weights, read_shard
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import FAMILIES, param_map

TP_SIZES = (1, 2, 4)


def random_tensors(kv_heads, q_to_kv, head_size, ffn, vocab, dtype, seed):
    """One Qwen2 layer with embedding, final norm and head: every kind of parameter there is."""
    hidden, kv = kv_heads * q_to_kv * head_size, kv_heads * head_size
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    shapes = {f"model.layers.0.{name}": shape for name, shape in layer.items()} | {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(folder, tensors, num_files):
    """One file, or several with an index, as Hugging Face writes them."""
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = [f"model-{number:05}-of-{num_files:05}.safetensors" for number in range(1, num_files + 1)]
    files = {name: names[position % num_files] for position, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.fixture(params=[1, 3], ids=["one file", "three files"])
def folder(request, tmp_path):
    """A folder of 4 x 2 heads of size 2, ffn 12, vocabulary 70 (padded to 128), with its tensors."""
    tensors = random_tensors(4, 2, 2, 12, 70, torch.float32, seed=0)
    write(tmp_path, tensors, request.param)
    return HFFolder(tmp_path), tensors


SPECS = param_map(FAMILIES["Qwen2ForCausalLM"], 1, tied=False)
LAYER = "decoder.layers.0."


def shards(folder, name, tp_size, vocab=70):
    return [read_shard(folder, SPECS[name], vocab, tp_rank, tp_size) for tp_rank in range(tp_size)]


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_plain_shards_concatenate_to_the_tensor(folder, tp_size):
    """Column and row splits and replicated tensors. Would not catch fused ones."""
    source, tensors = folder
    o_proj = shards(source, LAYER + "self_attention.linear_proj.weight", tp_size)
    assert torch.equal(torch.cat(o_proj, 1), tensors["model.layers.0.self_attn.o_proj.weight"])
    down = shards(source, LAYER + "mlp.linear_fc2.weight", tp_size)
    assert torch.equal(torch.cat(down, 1), tensors["model.layers.0.mlp.down_proj.weight"])
    assert {shard.shape[1] for shard in down} == {12 // tp_size}
    for norm in shards(source, LAYER + "pre_mlp_layernorm.weight", tp_size):
        assert torch.equal(norm, tensors["model.layers.0.post_attention_layernorm.weight"])


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize(
    ("name", "tensor"),
    [("embedding.word_embeddings.weight", "model.embed_tokens.weight"), ("output_layer.weight", "lm_head.weight")],
)
def test_vocabulary_is_padded_with_zero_rows(folder, name, tensor, tp_size):
    """70 real rows of 128, cut evenly. Would not catch a padding that differs from vLLM's."""
    source, tensors = folder
    parts = shards(source, name, tp_size)
    assert {part.shape[0] for part in parts} == {128 // tp_size}
    whole = torch.cat(parts)
    assert torch.equal(whole[:70], tensors[tensor]) and whole[70:].eq(0).all()


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_qkv_and_gate_up_are_fused_inside_each_shard(folder, tp_size):
    """[q; k; v] and [gate; up] of this rank's rows. Would not catch a split through a head."""
    source, tensors = folder
    for name, prefix, kind, parts in (
        ("self_attention.linear_qkv.weight", "self_attn.", "weight", ("q_proj", "k_proj", "v_proj")),
        ("self_attention.linear_qkv.bias", "self_attn.", "bias", ("q_proj", "k_proj", "v_proj")),
        ("mlp.linear_fc1.weight", "mlp.", "weight", ("gate_proj", "up_proj")),
    ):
        sources = [tensors[f"model.layers.0.{prefix}{part}.{kind}"] for part in parts]
        for tp_rank, shard in enumerate(shards(source, LAYER + name, tp_size)):
            assert torch.equal(shard, torch.cat([whole.chunk(tp_size)[tp_rank] for whole in sources]))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), tp_size=st.sampled_from(TP_SIZES), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_unfuse_undoes_read_shard(data, tp_size, dtype):
    """Byte-identical tensors for any sizes and GQA ratio. Would not catch names that transformers does not know."""
    q_to_kv = data.draw(st.integers(1, 4))
    vocab = data.draw(st.integers(1, 200))
    tensors = random_tensors(
        kv_heads=tp_size * data.draw(st.integers(1, 2)),
        q_to_kv=q_to_kv,
        head_size=data.draw(st.sampled_from([1, 2, 6])),
        ffn=tp_size * data.draw(st.integers(1, 5)),
        vocab=vocab,
        dtype=dtype,
        seed=data.draw(st.integers(0, 99)),
    )
    with tempfile.TemporaryDirectory() as path:
        write(Path(path), tensors, num_files=data.draw(st.integers(1, 2)))
        source = HFFolder(Path(path))
        restored = {}
        for name, spec in SPECS.items():
            parts = shards(source, name, tp_size, vocab)
            restored |= unfuse(parts, spec, fused_sizes(spec, parts[0].shape[0], q_to_kv), vocab)
    assert restored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert restored[name].dtype == dtype and torch.equal(restored[name], tensor), name


def test_load_copies_into_parameters_and_refuses_another_shape(folder):
    """The right rows arrive, and a wrong shape is named. Would not catch a parameter that is left out."""
    source, tensors = folder
    name = LAYER + "mlp.linear_fc2.weight"
    parameter = torch.nn.Parameter(torch.zeros(16, 6, dtype=torch.bfloat16))
    load_hf_weights({name: parameter}, SPECS, source, 70, tp_rank=1, tp_size=2)
    assert torch.equal(parameter, tensors["model.layers.0.mlp.down_proj.weight"][:, 6:].bfloat16())
    wrong = torch.nn.Parameter(torch.zeros(16, 7))
    with pytest.raises(ConfigError, match=r"down_proj.*\(16, 6\).*\(16, 7\)"):
        load_hf_weights({name: wrong}, SPECS, source, 70, tp_rank=1, tp_size=2)


def test_a_missing_tensor_and_an_empty_folder_are_named(folder, tmp_path_factory):
    """The messages hold tensor and path. Would not catch a file that the index names and nobody wrote."""
    source, _ = folder
    del source.files["lm_head.weight"]
    with pytest.raises(ConfigError, match=r"'lm_head\.weight' is not in") as raised:
        shards(source, "output_layer.weight", 2)
    assert str(source.path) in str(raised.value)
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors in .*empty"):
        HFFolder(empty)


def test_global_names_count_layers_over_the_pipeline():
    """A stage whose first layer is 3. Would not catch a stage without layers."""
    assert global_name("decoder.layers.1.mlp.linear_fc1.weight", 3) == "decoder.layers.4.mlp.linear_fc1.weight"
    assert global_name("decoder.layers.10.mlp.linear_fc1.weight", 3) == "decoder.layers.13.mlp.linear_fc1.weight"
    assert global_name("output_layer.weight", 3) == "output_layer.weight"
