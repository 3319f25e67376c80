"""Multi-token prediction layers: what is refused before anything starts, word for word, and what a plan counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_folders import EXPERTS, problems, write_model, write_tensors

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.model.families.mtp_params import mtp_map
from megatron_rl.planning.memory import plan_stages
from megatron_rl.planning.run_models import RunModels

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KEY, FACTOR = f"{ROLLOUT}.speculative", f"{ACTOR}.mtp_loss_scaling_factor"
LATENT = EXPERTS | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 12,
    "tie_word_embeddings": False,
}


@pytest.fixture
def guessing(config):
    """A run whose policy is a DeepSeek-V3 with a whole MTP layer."""
    folder = Path(write_model(Path(config.actor_rollout_ref.model.path), **LATENT))
    write_layer(folder)
    config.actor_rollout_ref.rollout.speculative = "mtp"
    return config


def write_layer(folder: Path, lacking: str = "nothing") -> None:
    """Tensors of one element under the names of the layer's, without those that end so."""
    model = ModelFolder(str(folder)).model
    specs = mtp_map(model.family, model.shape).values()
    names = {name.format(expert=n) for spec in specs for name in spec.hf_names for n in range(8)}
    names.add("model.layers.6.mlp.gate.e_score_correction_bias")
    write_tensors(folder / "model.safetensors", {name: "F32" for name in sorted(names) if not name.endswith(lacking)})


def about_mtp(config) -> list[str]:
    return [text for text in problems(config) if KEY in text or FACTOR in text]


def test_a_model_with_a_layer_passes(guessing):
    """Trained and frozen. Would not catch a layer of other shapes, which is refused where it is read."""
    assert about_mtp(guessing) == []
    guessing.actor_rollout_ref.actor.mtp_loss_scaling_factor = 0.1
    assert about_mtp(guessing) == []


def test_models_without_a_layer(guessing):
    """Another family, another number of layers, and a folder that lacks a tensor."""
    path = guessing.actor_rollout_ref.model.path
    folder, begin = (
        Path(path),
        f"{KEY}=mtp and actor_rollout_ref.model.path={path} do not go together: no multi-token prediction layer: ",
    )
    write_model(folder)
    able = "DeepseekV3ForCausalLM, Glm4MoeForCausalLM, Glm4MoeLiteForCausalLM, MiMoForCausalLM"
    assert about_mtp(guessing) == [f"{begin}Qwen2ForCausalLM has none that is read; {able} have; try: {KEY}=earlier"]
    write_model(folder, **LATENT | {"num_nextn_predict_layers": 2})
    (problem,) = about_mtp(guessing)
    assert problem == (
        f"{begin}num_nextn_predict_layers of its config.json is 2, and one layer is read; try: {KEY}=earlier"
    )
    write_model(folder, **LATENT)
    write_layer(folder, lacking="hnorm.weight")
    assert about_mtp(guessing) == [f"{begin}its folder is missing model.layers.6.hnorm.weight; try: {KEY}=earlier"]


def test_a_plan_counts_the_layer_once(guessing):
    """By hand: trained, the last stage holds 16 bytes of each parameter more (float32, a gradient, two moments), frozen
    4; the first stage none. Would not catch activations, which real layers are compared with elsewhere.
    """
    shared = guessing.actor_rollout_ref
    shared.actor.megatron.pipeline_model_parallel_size = 2
    shared.ref.megatron.pipeline_model_parallel_size = guessing.critic.megatron.pipeline_model_parallel_size = 2
    for role in (shared.actor, shared.ref, guessing.critic):
        role.megatron.tensor_model_parallel_size = 1
    shared.rollout.tensor_model_parallel_size, guessing.trainer.n_gpus_per_node = 1, 2

    def held() -> list[dict[str, int]]:
        stages = plan_stages(RunModels(guessing))
        return [
            {name: size for name, size in stage.phases["update_actor"].items() if name.startswith("actor ")}
            for stage in stages
        ]

    model = ModelFolder(shared.model.path).model
    numel = sum(spec.tensor.numel for spec in mtp_map(model.family, model.shape).values())
    frozen = held()
    shared.actor.mtp_loss_scaling_factor = 0.1
    trained = held()
    shared.actor.mtp_loss_scaling_factor, shared.rollout.speculative = 0.0, None
    without = held()
    assert frozen[0] == trained[0] == without[0]
    more = [{name: stage[1][name] - without[1][name] for name in without[1]} for stage in (frozen, trained)]
    assert more[0] == pytest.approx({"actor parameters": 4 * numel, "actor gradients": 0, "actor moments": 0}, abs=4096)
    expected = {"actor parameters": 4 * numel, "actor gradients": 4 * numel, "actor moments": 8 * numel}
    assert more[1] == pytest.approx(expected, abs=4096)
