"""PEFT's folders that cannot be read as plain LoRA of the configured rank are refused by name, never by a traceback."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint.adapter_folder import CONFIG, WEIGHTS, AdapterFiles, PeftSettings
from megatron_rl.checkpoint.adapter_weights import load_adapters
from megatron_rl.checkpoint.identity import folder_digest
from megatron_rl.config.lora import LoraConfig
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import Model
from megatron_rl.model.families.adapter_params import adapter_specs, peft_specs
from megatron_rl.parallel.sharding import Place, shard_of

SETTINGS = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}
MODEL = Model.of(SETTINGS)
LORA = LoraConfig(rank=3, alpha=6.0, target_modules=["q_proj", "down_proj"])
PLACE = Place(tp_rank=1, tp_size=2, vocab_multiple=2)


def write(folder: Path, **changes) -> Path:
    """A whole folder of random adapters; changes: of its settings."""
    torch.manual_seed(0)
    shapes = {spec.hf_names[0]: spec.tensor.segments[0].shape for spec in peft_specs(MODEL.specs, LORA).values()}
    folder.mkdir(exist_ok=True)
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / WEIGHTS)
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **changes}
    (folder / CONFIG).write_text(json.dumps(settings))
    return folder


def load(folder: Path, lora: LoraConfig = LORA) -> dict[str, torch.Tensor]:
    """The shards of one rank of two, as a role reads them."""
    specs = adapter_specs(MODEL.specs, lora)
    shards = {name: torch.full(shard_of(spec.tensor, PLACE).shape, 9.0) for name, spec in specs.items()}
    opened = AdapterFiles.open(folder)
    opened.refuse_other(lora)
    load_adapters(shards, specs, opened, PLACE)
    return shards


def test_shards_are_cut_and_padded(tmp_path: Path) -> None:
    """Rows of q and columns of down by halves, and zeros up to vLLM's rank 8. Would not catch other linears."""
    shards, whole = load(write(tmp_path)), load_file(tmp_path / WEIGHTS)
    prefix, layer = "base_model.model.model.layers.1.", "decoder.layers.1."
    down_a = shards[layer + "mlp.linear_fc2.adapters.down_proj.lora_A"]
    q_b = shards[layer + "self_attention.linear_qkv.adapters.q_proj.lora_B"]
    assert torch.equal(down_a[:3], whole[prefix + "mlp.down_proj.lora_A.weight"][:, 24:])
    assert torch.equal(q_b[:, :3], whole[prefix + "self_attn.q_proj.lora_B.weight"][16:])
    assert down_a.shape == (8, 24) and q_b.shape == (16, 8)
    assert not down_a[3:].any() and not q_b[:, 3:].any()


def drop(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def tear(file: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / file, 20)


def settings(**changes) -> Callable[[Path], None]:
    return lambda folder: write(folder, **changes) and None


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def typed(dtype: torch.dtype) -> Callable[[Path], None]:
    return tensors(lambda all: all | {FIRST: torch.ones(3, 48).to(dtype)})


NO_WEIGHTS = {"int8": "I8", "uint8": "U8", "bool": "BOOL", "int64": "I64", "complex64": "C64"}
NO_WEIGHTS |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
QKV = "decoder.layers.{}.self_attention.linear_qkv.adapter"
FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
FAULTS = {
    "half: no weights": (drop(WEIGHTS), f"must have {CONFIG} and {WEIGHTS}, and {WEIGHTS} is missing"),
    "half: no settings": (drop(CONFIG), f"{CONFIG} is missing"),
    "torn settings": (tear(CONFIG), f"cannot be read: {CONFIG} is not valid JSON"),
    "torn weights": (tear(WEIGHTS), f"cannot be read: {WEIGHTS} has 20 bytes, which hold no header"),
    "empty weights": (lambda folder: os.truncate(folder / WEIGHTS, 0), f"{WEIGHTS} has 0 bytes"),
    "a list": (lambda folder: (folder / CONFIG).write_text("[]") and None, "is not an object in braces"),
    "deep settings": (lambda folder: (folder / CONFIG).write_text("[" * 100_000) and None, "levels deep"),
    "no rank": (settings(r=None), "r=None must be a whole number >= 1"),
    "an infinite rank": (settings(r=math.inf), "r=inf must be a whole number >= 1"),
    "a true rank": (settings(r=True), "r=True must be a whole number >= 1"),
    "a huge alpha": (settings(lora_alpha=10**400), "a number has 401 digits"),
    "no number as alpha": (settings(lora_alpha=math.nan), "lora_alpha=nan must be a finite number"),
    "heads as text": (settings(modules_to_save="score"), "modules_to_save='score' must be a list of names"),
    "DoRA": (settings(use_dora=True), "use_dora=True must be False"),
    "rslora": (settings(use_rslora=True), "use_rslora=True must be False"),
    "other method": (settings(peft_type="IA3"), "peft_type=IA3 must be LORA"),
    "ranks of its own": (settings(rank_pattern={"q_proj": 2}), "rank_pattern={'q_proj': 2} must be {}"),
    "a base of its own": (settings(init_lora_weights="pissa"), "init_lora_weights=pissa must be True"),
    "embeddings": (settings(modules_to_save=["embed_tokens"]), "modules_to_save=['embed_tokens'] must be among []"),
    "other rank": (settings(r=4), "lora.rank=3 must be that of lora.adapter_path="),
    "other alpha": (settings(lora_alpha=3), "which is 3; try: lora.alpha=3"),
    "one less": (tensors(lambda all: {name: all[name] for name in all if name != FIRST}), f"it is missing ['{FIRST}']"),
    "one more": (tensors(lambda all: all | {"x": torch.ones(1)}), "and has ['x'] in addition"),
    "misshapen": (tensors(lambda all: all | {FIRST: torch.ones(3, 47)}), "is [3, 47], the model implies [3, 48]"),
    "not finite": (tensors(lambda all: all | {FIRST: torch.full((3, 48), torch.nan)}), "is NaN or infinite"),
    "too large": (
        tensors(lambda all: all | {FIRST: torch.full((3, 48), 1e39, dtype=torch.float64)}),
        "is too large for torch.float32",
    ),
    **{
        f"weights of {name}": (typed(getattr(torch, name)), f"{FIRST} in {WEIGHTS} is of type {stored}: weights must")
        for name, stored in NO_WEIGHTS.items()
    },
    "one for all experts": (
        tensors(lambda _: {"decoder.layers.0.mlp.experts.linear_fc1.adapter.linear_in.weight": torch.ones(3, 32)}),
        "of Megatron's linears whole tensors are read, such as "
        "decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight, and none of routed experts; try: "
        "what Megatron-Bridge exports as a PEFT folder",
    ),
    "one of several": (
        tensors(
            lambda all: (
                {name: all[name] for name in all if "down_proj" in name}
                | {f"{QKV.format(layer)}.linear_in.weight": torch.ones(3, 32) for layer in (0, 1)}
                | {f"{QKV.format(layer)}.linear_out.weight": torch.ones(64, 3) for layer in (0, 1)}
            )
        ),
        "linear_qkv.adapter.linear_out.weight in",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    """With the file and the value. Would not catch a setting that a later PEFT adds."""
    spoil, expected = FAULTS[name]
    spoil(write(tmp_path / "adapter"))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "adapter")
    assert expected in str(caught.value)


def test_fused_adapters_are_cut(tmp_path: Path) -> None:
    """Megatron-Bridge's of all linears: every rank has what it has from PEFT's names, where A is there once for each
    matrix. Megatron's rows of a group are its queries, its key and its value. Would not catch another order of groups.
    """
    lora = LoraConfig(rank=3, alpha=6.0)
    torch.manual_seed(0)
    specs = peft_specs(MODEL.specs, lora)
    own = {spec.hf_names[0]: torch.randn(spec.tensor.segments[0].shape) for spec in specs.values()}
    fused, groups, size = {}, 2, 8
    for layer in (0, 1):
        for name, part, projections in (
            ("self_attention.linear_qkv", "self_attn", ("q", "k", "v")),
            ("self_attention.linear_proj", "self_attn", ("o",)),
            ("mlp.linear_fc1", "mlp", ("gate", "up")),
            ("mlp.linear_fc2", "mlp", ("down",)),
        ):
            prefix = f"base_model.model.model.layers.{layer}.{part}."
            names = [f"{prefix}{projection}_proj.lora_" for projection in projections]
            for other in names[1:]:
                own[f"{other}A.weight"] = own[f"{names[0]}A.weight"].clone()
            rows = [own[f"{each}B.weight"] for each in names]
            if len(rows) == 3:
                q, k, v = rows
                each = len(q) // groups
                rows = []
                for g in range(groups):
                    rows += [q[g * each : (g + 1) * each], k[g * size : (g + 1) * size], v[g * size : (g + 1) * size]]
            fused[f"decoder.layers.{layer}.{name}.adapter.linear_in.weight"] = own[f"{names[0]}A.weight"].clone()
            fused[f"decoder.layers.{layer}.{name}.adapter.linear_out.weight"] = torch.cat(rows)
    shards = []
    for number, tensors_of in enumerate((own, fused)):
        folder = write(tmp_path / str(number))
        save_file(tensors_of, folder / WEIGHTS)
        shards.append(load(folder, lora))
    assert shards[0].keys() == shards[1].keys() and len(shards[0]) == 28
    assert all(torch.equal(tensor, shards[1][name]) for name, tensor in shards[0].items())


def test_other_targets_are_named(tmp_path: Path) -> None:
    """Would not catch targets that name the same matrices otherwise, which are no fault."""
    other = LoraConfig(rank=3, alpha=6.0, target_modules=["k_proj"])
    with pytest.raises(ConfigError, match="other adapters than target_modules asks for: it is missing .*k_proj"):
        load(write(tmp_path), other)
    load(tmp_path, LoraConfig(rank=3, alpha=6.0, target_modules=["*.q_proj", "linear_fc2"]))


def test_another_base_is_named(tmp_path: Path) -> None:
    """By the digest beside PEFT's files, where there is one. Would not catch a few changed numbers in a large base."""
    bases = [tmp_path / name for name in ("one", "two")]
    for number, base in enumerate(bases):
        base.mkdir()
        save_file({"x": torch.full((4, 4), float(number))}, base / "model.safetensors")
    folder = AdapterFiles.open(write(tmp_path / "adapter"))
    folder.refuse_other_base(bases[1])
    targets, digest = ("q_proj", "down_proj"), folder_digest(bases[0])
    PeftSettings(3, 6.0, base=bases[0], targets=targets, digest=digest).write(folder.path)
    folder.refuse_other_base(bases[0])
    with pytest.raises(ConfigError, match="were trained on weights with the digest"):
        folder.refuse_other_base(bases[1])
    (folder.path / "base_model.json").write_text("{}")
    with pytest.raises(ConfigError, match="digest None"):
        folder.refuse_other_base(bases[1])
    (folder.path / "base_model.json").unlink()
    (folder.path / "base_model.json").symlink_to("moved.json")
    with pytest.raises(ConfigError, match="base_model.json must be a file, and it is a link to nothing"):
        folder.refuse_other_base(bases[0])


def test_settings_that_peft_writes_are_read(tmp_path: Path) -> None:
    """All of the installed PEFT's defaults. Would not catch those of other versions."""
    from peft import LoraConfig as PeftLora

    write(tmp_path)
    PeftLora(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    assert load(tmp_path)
