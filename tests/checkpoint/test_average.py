"""Averages of models: the numbers, and what cannot be averaged. Of Hugging Face folders; tests/e2e has checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from megatron_rl.checkpoint.average import Averaging, moving, shares_of, uniform
from megatron_rl.errors import ConfigError

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
    "eos_token_id": 2,
    "architectures": ["Qwen2ForCausalLM"],
}
TOKENIZER = Path(__file__).parents[2] / "assets/demo/model"


def save(folder: Path, seed: int, dtype: torch.dtype = torch.float32, **changes) -> Path:
    """A random model with the demo's tokenizer."""
    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **changes})).to(dtype).save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_shares_by_hand():
    """Three models: equal, weighed, and a moving average of decay 0.9: 0.9 (0.9 a + 0.1 b) + 0.1 c. Would not catch an
    order that the caller mixes up."""
    assert uniform(4) == [0.25] * 4
    assert shares_of([1, 1, 2], 3) == [0.25, 0.25, 0.5]
    assert moving(3, 0.9) == pytest.approx([0.81, 0.09, 0.1]) and moving(1, 0.9) == [1.0]
    assert shares_of([1e308, 1e308], 2) == [0.5, 0.5] and shares_of([0, 5e-324], 2) == [0.0, 1.0]
    assert sum(moving(50, 0.99)) == pytest.approx(1.0, abs=1e-12)


def test_average_of_folders(tmp_path: Path):
    """Every tensor is the weighed sum, in float64 and rounded once; transformers loads the folder, and it says of what
    it is made. Would not catch a tensor that no model has."""
    folders = [save(tmp_path / name, seed) for seed, name in enumerate("abc")]
    Averaging.of(folders, "1,2,5", None, "actor", tmp_path / "mean").write()
    parts, found = [weights(folder) for folder in folders], weights(tmp_path / "mean")
    assert found.keys() == parts[0].keys()
    for name, tensor in found.items():
        expected = sum(share * part[name].double() for share, part in zip((0.125, 0.25, 0.625), parts, strict=True))
        assert torch.equal(tensor, expected.float()), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mean")
    assert model.config.vocab_size == 40 and model.dtype == torch.float32
    said = json.loads((tmp_path / "mean" / "average.json").read_text())
    assert [one["share"] for one in said] == [0.125, 0.25, 0.625] and said[2]["checkpoint"] == str(folders[2])


def test_what_is_shared_stays_as_it_is(tmp_path: Path):
    """A third of bfloat16 weights three times over is these weights, bit for bit. Would not catch a drift of others."""
    folders = [save(tmp_path / name, 0, torch.bfloat16) for name in "abc"]
    made = Averaging.of(folders, None, None, "actor", tmp_path / "mean")
    made.write()
    for name, tensor in weights(tmp_path / "mean").items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, weights(folders[0])[name]), name
    assert made.lines()[1] == f"  0.3333 of {folders[0]}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 3}, "its num_hidden_layers is 3, not 2"),
        ({"vocab_size": 41}, "its vocab_size is 41, not 40"),
        ({"rms_norm_eps": 1e-5}, "its rms_norm_eps is 1e-05, not 1e-06"),
    ],
)
def test_different_models_are_refused(tmp_path: Path, changes, said):
    """With the first difference, before anything is written. Would not catch models that differ in their weights alone,
    which is what an average is of."""
    first, other = save(tmp_path / "a", 0), save(tmp_path / "b", 1, **changes)
    with pytest.raises(ConfigError, match=f"b is another model than .*a: {said}; only one model"):
        Averaging.of([first, other], None, None, "actor", tmp_path / "mean").write()
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value):
    """Tensor and file are named, and nothing is left. Would not catch one in a checkpoint that counts nothing."""
    folders = [save(tmp_path / name, seed) for seed, name in enumerate("ab")]
    tensors = weights(folders[1])
    tensors["model.norm.weight"][3] = value
    save_file(tensors, folders[1] / "model.safetensors", metadata={"format": "pt"})
    said = "b cannot be averaged: an element of model.norm.weight in model.safetensors is NaN or infinite"
    with pytest.raises(ConfigError, match=said):
        Averaging.of(folders, None, None, "actor", tmp_path / "mean").write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_weights_that_are_no_floating_numbers_are_refused(tmp_path: Path):
    """With file, tensor and type; and a pipe is not waited for. Would not catch numbers packed into such weights."""
    folders = [save(tmp_path / name, seed) for seed, name in enumerate("ab")]
    tensors = weights(folders[1])
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folders[1] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"b cannot be averaged: model.norm.weight in model.safetensors is of type I8"
    ):
        Averaging.of(folders, None, None, "actor", tmp_path / "mean").write()
    for name in ("chat_template.json", "config.json"):
        (folders[1] / name).unlink(missing_ok=True)
        os.mkfifo(folders[1] / name)
        with pytest.raises(ConfigError, match=f"{name} must be a file, and it is a pipe"):
            Averaging.of(folders, None, None, "actor", tmp_path / "mean").write()
        (folders[1] / name).unlink()
    assert not (tmp_path / "mean").exists()


def test_other_tokens_are_refused(tmp_path: Path):
    """Would not catch a tokenizer that splits text otherwise into the same tokens."""
    first, other = save(tmp_path / "a", 0), save(tmp_path / "b", 1)
    content = json.loads((other / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    left, right = sorted(vocab)[:2]
    vocab[left], vocab[right] = vocab[right], vocab[left]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="its tokenizer has '.*' as [0-9]+, not [0-9]+"):
        Averaging.of([first, other], None, None, "actor", tmp_path / "mean").write()


@pytest.mark.parametrize(
    ("weights", "ema", "said"),
    [
        ("1,2,3", None, "--weights has 3 numbers, which must be one for each of 2 checkpoints"),
        ("1,x", None, "--weights 1,x must be numbers with commas between them; try: --weights 1,1"),
        ("0,0", None, "--weights 0,0 must be finite, >= 0 and not all 0; try: --weights 1,1"),
        ("1,-1", None, "must be finite, >= 0"),
        ("1,nan", None, "must be finite, >= 0"),
        (None, 1.0, "--ema 1 must be > 0 and < 1; try: --ema 0.9"),
        ("1,1", 0.5, "--weights and --ema both set the weights of the checkpoints"),
    ],
)
def test_bad_shares_are_refused(tmp_path: Path, weights, ema, said):
    """Would not catch numbers that are not what their user meant."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as refused:
        Averaging.of([tmp_path / "a", tmp_path / "b"], weights, ema, "actor", tmp_path / "mean")
    assert said in str(refused.value)


def test_bad_folders_are_refused(tmp_path: Path):
    """One alone, a target that is there, and a folder that is no checkpoint. Would not catch a folder that goes while
    it is read."""
    folder = save(tmp_path / "a", 0)
    with pytest.raises(ConfigError, match="must be at least 2 checkpoints, and .*a is 1"):
        Averaging.of([folder], None, None, "actor", tmp_path / "mean")
    with pytest.raises(ConfigError, match="--target .*a must not exist"):
        Averaging.of([folder, folder], None, None, "actor", folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty is neither a checkpoint"):
        Averaging.of([folder, tmp_path / "empty"], None, None, "actor", tmp_path / "mean")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text((folder / "config.json").read_text())
    deep = save(tmp_path / "deep", 0)
    (deep / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="deep cannot be averaged: tokenizer_config.json is not valid JSON"):
        Averaging.of([folder, deep], None, None, "actor", tmp_path / "mean").write()
    with pytest.raises(ConfigError, match="b cannot be averaged: it has no weights"):
        Averaging.of([folder, tmp_path / "b"], None, None, "actor", tmp_path / "mean").write()
