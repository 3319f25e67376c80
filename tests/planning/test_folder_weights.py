"""Which tensors a model folder may hold, of what types and in which files, told from headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_folders import EXPERTS, TOKENIZER, problems, set_experts, write_model, write_tensors
from test_model_folder import LATENT

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.model.families import FAMILIES, REWARD_FAMILIES
from megatron_rl.planning.folder_checks import read_model_folder

Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EXPERT = "model.layers.{}.mlp.experts.{}.up_proj.weight"


@pytest.mark.parametrize("dtype", ["I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "I32", "I64", "F4"])
def test_weights_are_floating_numbers(config, tmp_path, dtype):
    """One sentence names tensor, file and type; all floating types pass. Would not catch numbers packed into these."""
    folder = Path(write_model(tmp_path / "model"))
    write_tensors(folder / WEIGHTS, {NORM: "F32", Q: dtype, EMBEDDING: dtype})
    (problem,) = problems(config)
    assert f"{Q} in model.safetensors is of type {dtype} (and 1 more tensors): weights must be of type F64" in problem
    write_tensors(folder / WEIGHTS, {NORM: "F32", Q: "BF16", EMBEDDING: "F16", HEAD: "F64"})
    assert problems(config) == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["model.layers.6.mlp.up_proj.weight", "model.layers.7.mlp.up_proj.weight"], "num_hidden_layers=6 of"),
        (["model.layers.0.self_attn.o_proj.bias"], "and holds model.layers.0.self_attn.o_proj.bias"),
        (["model.layers.0.self_attn.q_norm.weight", "model.layers.6.mlp.up_proj.weight"], "holds model.layers.0.self_"),
        (["lm_head.bias"], "and holds lm_head.bias"),
        (["language_model.model.norm.weight"], "and holds language_model.model.norm.weight"),
        ([EXPERT.format(0, 0)], "and holds model.layers.0.mlp.experts.0"),
    ],
)
def test_what_nothing_reads_is_refused(config, tmp_path, names, said):
    """Of layers beyond the last the right number is offered. Would not catch a tensor that is not there."""
    folder = Path(write_model(tmp_path / "model"))
    write_tensors(folder / WEIGHTS, dict.fromkeys([NORM, *names], "F32"))
    (problem,) = problems(config)
    assert said in problem
    if len(names) == 2 and "layers.7" in names[1]:
        assert "must be the number of layers, and its weights have 8" in problem and problem.endswith("try: 8")


def test_experts_beyond_the_last_are_refused(moe_config, tmp_path):
    """Of 8 the last is 7. Would not catch an expert that is not there."""
    set_experts(moe_config, sequence_parallel=True)
    folder = Path(write_model(tmp_path / "model", **EXPERTS))
    write_tensors(folder / WEIGHTS, {EXPERT.format(5, 7): "F32", "model.layers.5.mlp.gate.weight": "F32"})
    assert problems(moe_config) == []
    for name in (EXPERT.format(5, 8), EXPERT.format(5, "07")):
        write_tensors(folder / WEIGHTS, {name: "F32"})
        (problem,) = problems(moe_config)
        assert f"and holds {name}" in problem


def test_layers_that_predict_several_tokens_are_carried(tmp_path):
    """As many as config.json says, with a line about it. Would not catch such layers in the place of others."""
    names = [f"model.layers.6.{part}.weight" for part in ("enorm", "mlp.experts.0.up_proj", "shared_head.head", "x")]
    for changes, count in (({"num_nextn_predict_layers": 1}, 0), ({}, 1), ({"num_nextn_predict_layers": 0}, 1)):
        folder = Path(write_model(tmp_path / "model", **LATENT, **changes))
        write_tensors(folder / WEIGHTS, {NORM: "BF16"} | dict.fromkeys(names, "I8"))
        sizes, found = read_model_folder("key", ModelFolder(folder))
        assert len(found) == count, found
    folder = Path(write_model(folder, **LATENT, num_nextn_predict_layers=1))
    write_tensors(folder / WEIGHTS, dict.fromkeys(names, "BF16"))
    sizes, _ = read_model_folder("key", ModelFolder(folder))
    assert sizes.unread == (
        f"these tensors of {folder} are not read: {', '.join(names[:3])} and 1 more, of 64 bytes, which exports of the "
        "language model write again"
    )


@pytest.mark.parametrize(
    ("architecture", "names", "said"),
    [
        ("Qwen2ForCausalLM", ["score.weight"], "score.weight, of another head"),
        ("Qwen2ForCausalLM", ["v_head.summary.weight", "v_head.summary.bias"], "v_head.summary.weight, v_head.summ"),
        ("Qwen2ForCausalLM", ["model.layers.3.self_attn.rotary_emb.inv_freq"], None),
        ("Qwen2ForSequenceClassification", ["lm_head.weight"], "lm_head.weight, of another head"),
        ("Qwen2ForSequenceClassification", ["score.weight"], None),
    ],
)
def test_other_heads_and_buffers_are_left(tmp_path, architecture, names, said):
    """A folder may have been of another role. Would not catch a head under a name that nobody uses."""
    folder = Path(write_model(tmp_path / "model", architectures=[architecture], id2label={"0": "a"}))
    write_tensors(folder / WEIGHTS, dict.fromkeys(names, "F32"))
    sizes, found = read_model_folder("key", ModelFolder(folder), FAMILIES | REWARD_FAMILIES)
    assert found == [] and (sizes.unread is None if said is None else said in sizes.unread)


def test_a_reward_models_own_head_is_one_weight(tmp_path):
    """Its bias would be left without a word. Would not catch a head of two rows, whose shape is compared later."""
    folder = Path(write_model(tmp_path / "model", architectures=["Qwen2ForSequenceClassification"], num_labels=1))
    write_tensors(folder / WEIGHTS, {"score.weight": "F32", "score.bias": "F32"})
    (problem,) = read_model_folder("key", ModelFolder(folder), REWARD_FAMILIES)[1]
    assert "and holds score.bias" in str(problem)


@pytest.mark.parametrize(("value", "count"), [(0, 0), (1, 1)])
def test_a_tied_head_is_the_embedding(config, tmp_path, value, count):
    """Where both are there. Would not catch a difference between the blocks that are compared."""
    folder = Path(write_model(tmp_path / "model", tie_word_embeddings=True))
    write_tensors(folder / WEIGHTS, {EMBEDDING: "F32", HEAD: "F32"}, last=value)
    found = problems(config)
    assert len(found) == count
    assert all("lm_head.weight differs from model.embed_tokens.weight" in problem for problem in found)


def test_the_files_are_those_that_transformers_reads(config, tmp_path):
    """model.safetensors before all others, and before an index only where that names it alone. Would not catch another
    version of transformers."""
    folder = Path(write_model(tmp_path / "model"))
    write_tensors(folder / WEIGHTS, {NORM: "F32"})
    write_tensors(folder / "consolidated.safetensors", {"norm.weight": "I8"})
    assert problems(config) == []
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: WEIGHTS}}))
    assert problems(config) == []
    write_tensors(folder / "model-00001-of-00001.safetensors", {NORM: "F32"})
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: "model-00001-of-00001.safetensors"}}))
    (problem,) = problems(config)
    assert "model.safetensors exists, and model.safetensors.index.json names other files (model-00001-of-" in problem
    (folder / WEIGHTS).unlink()
    assert problems(config) == []
    (folder / INDEX).unlink()
    (folder / "consolidated.safetensors").unlink()
    write_tensors(folder / "model-00002-of-00002.safetensors", {NORM: "F32"})
    (problem,) = problems(config)
    assert "model-00002-of-00002.safetensors holds what model-00001-of-00001.safetensors holds, too" in problem


@pytest.mark.parametrize(
    ("vocab", "added", "said"),
    [
        ({"a": 0, "b": 99}, {"c": 100}, None),
        ({"a": 0, "b": 100, "c": 99}, {}, "must be above 100, the largest number of a token in its tokenizer.json"),
        ({"a": 0, "b": 100}, {"b": 100}, None),
        ([[str(number), 0.0] for number in range(101)], {}, "must be above 100"),
    ],
)
def test_the_tokens_of_a_text_are_those_of_the_model(config, tmp_path, vocab, added, said):
    """vocab_size is 100; an added token beyond it is no token of a text. Would not catch a prompt that holds one."""
    folder = Path(write_model(tmp_path / "model"))
    content = json.loads(TOKENIZER) | {"model": {"vocab": vocab}}
    content["added_tokens"] = [{"content": token, "id": number} for token, number in added.items()]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    found = problems(config)
    assert found == [] if said is None else said in found[0] and found[0].endswith("try: 101")


@pytest.mark.parametrize(("content", "said"), [({"eos_token_id": [2, 100]}, "eos_token_id 100 of its generation_")])
def test_an_end_is_a_token_of_the_model(config, tmp_path, content, said):
    """vocab_size is 100. Would not catch an end that no answer reaches."""
    folder = Path(write_model(tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps(content))
    (problem,) = problems(config)
    assert said in problem and "is not below vocab_size(100)" in problem
    (folder / "generation_config.json").unlink()
    write_model(folder, eos_token_id=100)
    (problem,) = problems(config)
    assert "eos_token_id 100 of its config.json" in problem
