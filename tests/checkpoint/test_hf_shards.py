"""Reading TP shards from Hugging Face folders, and putting them together again, on small random tensors."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_import import HFFolder, global_name, load_hf_weights
from megatron_rl.checkpoint.hf_tensors import hf_tensors, pieces, put_together
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import FAMILIES, ModelShape, param_map
from megatron_rl.parallel.sharding import Place, shard_of

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


SPECS = param_map(FAMILIES["Qwen2ForCausalLM"], ModelShape(1, 16, 8, 4, 2, 12, 70, tied=False))
LAYER = "decoder.layers.0."


def shards(folder, name, tp_size, specs=SPECS, dtype=torch.float32):
    """What each TP rank loads, over a parameter that was never initialised."""
    loaded = []
    for tp_rank in range(tp_size):
        place = Place(tp_rank, tp_size, vocab_multiple=64)
        parameter = torch.nn.Parameter(torch.full(shard_of(specs[name].tensor, place).shape, torch.nan, dtype=dtype))
        load_hf_weights({name: parameter}, specs, folder, place)
        loaded.append(parameter.detach())
    return loaded


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
def test_export_undoes_import(data, tp_size, dtype):
    """Byte-identical tensors for any sizes and GQA ratio. Would not catch names that transformers does not know."""
    kv_heads, q_to_kv = tp_size * data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    head_size, ffn = data.draw(st.sampled_from([1, 2, 6])), tp_size * data.draw(st.integers(1, 5))
    vocab, heads = data.draw(st.integers(1, 200)), kv_heads * q_to_kv
    tensors = random_tensors(kv_heads, q_to_kv, head_size, ffn, vocab, dtype, seed=data.draw(st.integers(0, 99)))
    shape = ModelShape(1, heads * head_size, heads, kv_heads, head_size, ffn, vocab, tied=False)
    specs = param_map(FAMILIES["Qwen2ForCausalLM"], shape)
    with tempfile.TemporaryDirectory() as path:
        write(Path(path), tensors, num_files=data.draw(st.integers(1, 2)))
        source = HFFolder(Path(path))
        loaded = {name: shards(source, name, tp_size, specs, dtype) for name in specs}
    places = {rank: Place(rank, tp_size, vocab_multiple=64) for rank in range(tp_size)}
    assert_same_tensors(put_back(specs, places, loaded), tensors)


def put_back(specs, places, loaded):
    """Every Hugging Face tensor, from the shards of all ranks: {parameter: [shard of each rank]}."""
    return {
        tensor.name: put_together(
            tensor, ((p, loaded[tensor.parameter][p.rank][p.source]) for p in pieces(tensor, places, places))
        )
        for tensor in hf_tensors(specs)
        if tensor.parameter in loaded
    }


def assert_same_tensors(ours, expected):
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def test_experts_are_read_one_by_one_and_put_back(tmp_path):
    """EP2 x ETP2 of 4 experts, one rank by hand. Would not catch an order that the router does not use."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (6, 5), "up": (6, 5), "down": (5, 6)}
    tensors = {
        f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight": torch.randn(size, generator=generator)
        for expert in range(4)
        for kind, size in shapes.items()
    }
    write(tmp_path, tensors, num_files=1)
    shape = ModelShape(1, 5, 2, 2, 2, 6, 70, tied=False, num_experts=4)
    specs = param_map(FAMILIES["Qwen3MoeForCausalLM"], shape)
    names = ["decoder.layers.0.mlp.experts.w13", "decoder.layers.0.mlp.experts.w2"]
    places = {rank: Place(0, 1, 64, ep_rank=rank // 2, ep_size=2, etp_rank=rank % 2, etp_size=2) for rank in range(4)}
    loaded = {name: [] for name in names}
    for name in names:
        for rank, place in places.items():
            parameter = torch.nn.Parameter(torch.full(shard_of(specs[name].tensor, place).shape, torch.nan))
            load_hf_weights({name: parameter}, specs, HFFolder(tmp_path), place)
            loaded[name].append(parameter.detach())
            if rank == 3 and name.endswith("w13"):
                gate, up = (tensors[f"model.layers.0.mlp.experts.3.{kind}_proj.weight"] for kind in ("gate", "up"))
                assert torch.equal(parameter[1], torch.cat([gate[3:], up[3:]]))
    assert_same_tensors(put_back(specs, places, loaded), tensors)


def test_load_refuses_another_shape(folder):
    """A shape on disk and one in memory. Would not catch a parameter that is left out."""
    source, _ = folder
    name = LAYER + "mlp.linear_fc2.weight"
    place = Place(1, 2, vocab_multiple=64)
    with pytest.raises(RuntimeError, match=r"linear_fc2.*\(16, 7\).*\(16, 6\)"):
        load_hf_weights({name: torch.nn.Parameter(torch.zeros(16, 7))}, SPECS, source, place)
    specs = param_map(FAMILIES["Qwen2ForCausalLM"], ModelShape(1, 16, 8, 4, 2, 14, 70, tied=False))
    with pytest.raises(ConfigError, match=r"down_proj.*\(16, 12\).*config.json implies \(16, 14\)"):
        load_hf_weights({name: torch.nn.Parameter(torch.zeros(16, 7))}, specs, source, place)


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


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (float("nan"), torch.float32, "an element of model.norm.weight is NaN or infinite"),
        (float("-inf"), torch.bfloat16, "an element of model.norm.weight is NaN or infinite"),
        (1e5, torch.float16, "an element of model.norm.weight is too large for torch.float16"),
        (1e5, torch.bfloat16, None),
    ],
)
def test_weights_are_finite(tmp_path, value, dtype, said):
    """As they are read and as they are kept, with the file's name. Would not catch a number that is merely wrong."""
    tensors = random_tensors(4, 2, 2, 12, 70, torch.float32, seed=0)
    tensors["model.norm.weight"][-1] = value
    write(tmp_path, tensors, 1)
    (name,) = (name for name, spec in SPECS.items() if spec.hf_names == ("model.norm.weight",))
    if said is None:
        assert shards(HFFolder(tmp_path), name, 1, dtype=dtype)[0][-1] == torch.tensor(value, dtype=dtype)
        return
    with pytest.raises(ConfigError, match="model.safetensors cannot be used: ") as raised:
        shards(HFFolder(tmp_path), name, 1, dtype=dtype)
    assert said in str(raised.value)


def test_one_model_is_meant(tmp_path):
    """A file and an index of others: refused, also where the folder was not looked at before. Would not catch files of
    two models that one index names."""
    tensors = random_tensors(4, 2, 2, 12, 70, torch.float32, seed=0)
    write(tmp_path, tensors, 3)
    write(tmp_path, tensors, 1)
    with pytest.raises(ConfigError, match="transformers reads the former and vLLM the latter"):
        HFFolder(tmp_path)


@pytest.mark.parametrize("damage", ["cut off", "no header", "a pipe", "another tensor in its place"])
def test_damaged_weights_are_one_sentence(tmp_path, damage):
    """Where no preflight has looked, as with `export --base`. Would not catch other bytes inside of a tensor."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    content = file.read_bytes()
    file.write_bytes({"cut off": content[:-4], "no header": b"{"}.get(damage, content))
    if damage == "a pipe":
        file.unlink()
        os.mkfifo(file)
    if damage == "another tensor in its place":
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"b": "model.safetensors"}}')
    with pytest.raises(ConfigError, match=rf"{file} (must be a whole file|cannot be used)"):
        HFFolder(tmp_path).dtype("b")
