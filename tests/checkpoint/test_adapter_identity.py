"""A checkpoint of adapters is gone on from by the same adapters alone, and a refusal names both and the way out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from saved import MODELS, SETTINGS, write_files

from megatron_rl.checkpoint.adapter_folder import WEIGHTS, adapter_identity, reference_identity
from megatron_rl.checkpoint.folders import commit
from megatron_rl.checkpoint.resume import select
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import Model
from megatron_rl.model.families.adapter_params import peft_targets

RANK8, NONE = LoraConfig(rank=8), LoraConfig()
QKV = LoraConfig(rank=8, target_modules=["linear_qkv"])
KEY = "actor_rollout_ref.model.lora"


def models_of(lora: LoraConfig) -> dict[str, dict]:
    return {"actor": MODELS["actor"] | adapter_identity(SETTINGS, lora)}


def save(root: Path, models: dict[str, dict]) -> Path:
    folder, manifest = write_files(root, 10)
    return commit(folder, dataclasses.replace(manifest, models=MODELS | models))


@pytest.mark.parametrize(
    ("saved", "configured", "expected"),
    [
        (RANK8, LoraConfig(rank=16), f"is 8, and configured is 16: to resume, set {KEY}.rank=8"),
        (RANK8, LoraConfig(rank=8, alpha=16.0), f"is 32, and configured is 16: to resume, set {KEY}.alpha=32"),
        (QKV, RANK8, f"to resume, set {KEY}.target_modules=[k_proj,q_proj,v_proj]"),
        (
            RANK8,
            NONE,
            f"only adapters of rank 8, and configured is to train the whole actor: to resume, set {KEY}.rank=8",
        ),
        (NONE, RANK8, f"the whole actor, and configured are adapters of rank 8: to resume, set {KEY}.rank=0"),
        (None, RANK8, f"the whole actor, and configured are adapters of rank 8: to resume, set {KEY}.rank=0"),
    ],
    ids=["rank", "alpha", "targets", "whole from adapters", "adapters from whole", "from before there were adapters"],
)
def test_others_are_refused(saved, configured, expected, tmp_path: Path) -> None:
    """Would not catch adapters that start from another folder: what was saved replaces them."""
    save(tmp_path, MODELS if saved is None else models_of(saved))
    with pytest.raises(ConfigError) as caught:
        select(TrainerConfig(default_local_dir=str(tmp_path)), models_of(configured))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "configured"),
    [
        (RANK8, LoraConfig(rank=8, target_modules=["all-linear"], lora_A_init_method="normal")),
        (QKV, LoraConfig(rank=8, target_modules=["q_proj", "k_proj", "v_proj"])),
        (None, NONE),
        (NONE, NONE),
    ],
    ids=["all", "by other names", "from before there were adapters", "whole"],
)
def test_the_same_go_on(saved, configured, tmp_path: Path) -> None:
    """However the targets are spelled. Would not catch a target that a family gains later."""
    save(tmp_path, MODELS if saved is None else models_of(saved))
    assert select(TrainerConfig(default_local_dir=str(tmp_path)), models_of(configured)).step == 10


def test_a_reference_keeps_its_adapter(tmp_path: Path) -> None:
    """A reference of `adapter_path` is in no checkpoint: another folder of the same shapes, or none, is refused with
    both. A run without a reference, and a checkpoint that does not say, go on. Would not catch a change of an element
    that the digest does not sample.
    """
    loras = []
    for number in range(2):
        folder = tmp_path / f"adapter{number}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')
        save_file({"base_model.model.a.lora_A.weight": torch.full((8, 4), float(number))}, folder / WEIGHTS)
        loras.append(LoraConfig(rank=8, adapter_path=str(folder)))

    def models(lora: LoraConfig) -> dict[str, dict]:
        return {"actor": models_of(lora)["actor"] | reference_identity(lora)}

    first, second = (reference_identity(lora)["adapter of the reference"] for lora in loras)
    for number, (saved, configured, said) in enumerate(
        [
            (
                loras[0],
                loras[1],
                f"an adapter with the digest {first}, and configured is an adapter with the digest {second}",
            ),
            (loras[0], RANK8, f"an adapter with the digest {first}, and configured is no adapter"),
            (RANK8, loras[0], f"no adapter, and configured is an adapter with the digest {first}"),
        ]
    ):
        root = tmp_path / str(number)
        save(root, models(saved))
        with pytest.raises(ConfigError) as caught:
            select(TrainerConfig(default_local_dir=str(root)), models(configured))
        assert f"its reference has {said}: to resume, set {KEY}.adapter_path as it was" in " ".join(
            str(caught.value).split()
        )
        assert select(TrainerConfig(default_local_dir=str(root)), models_of(configured)).step == 10
        assert select(TrainerConfig(default_local_dir=str(root)), models(saved)).step == 10
    save(tmp_path / "before", models_of(loras[0]))
    assert select(TrainerConfig(default_local_dir=str(tmp_path / "before")), models(loras[1])).step == 10


def test_targets_as_short_as_they_can_be() -> None:
    """One name for all layers, full names for some of them, and a routed expert's if it has an adapter. Would not catch
    a model whose layers have other names."""
    dense = Model.of(SETTINGS).specs
    assert peft_targets(dense, LoraConfig(rank=1, target_modules=["linear_fc1"])) == ["gate_proj", "up_proj"]
    first = LoraConfig(rank=1, target_modules=["*.layers.1.*.q_proj", "linear_proj"])
    assert peft_targets(dense, first) == ["1.self_attn.q_proj", "o_proj"]
    experts = SETTINGS | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
    }
    specs = Model.of(experts).specs
    assert {"gate_proj", "up_proj", "down_proj"} <= set(peft_targets(specs, LoraConfig(rank=1)))
    assert peft_targets(specs, LoraConfig(rank=1, target_modules=["*.experts.linear_fc2"])) == ["experts.down_proj"]
    targets = peft_targets(specs, LoraConfig(rank=1, exclude_modules=["*.experts.*"]))
    assert {"q_proj", "shared_expert.gate_proj", "shared_expert.down_proj"} <= set(targets)
    assert not {"gate_proj", "down_proj"} & set(targets)
