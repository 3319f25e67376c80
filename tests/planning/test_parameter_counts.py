"""The planner's parameter counts against real Megatron models, built on meta for ranks that do not exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from ranks import run_ranks
from transformers import PreTrainedConfig, Qwen2MoeConfig, Qwen3_5MoeTextConfig, Qwen3NextConfig

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.model.families import family_of, param_map, shape_of, value_param_map
from megatron_rl.parallel.rank_grid import TrainGrid
from megatron_rl.parallel.sharding import vocab_multiple
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planning.weights import ModelParams, TrainedWeights

MODELS = Path(__file__).parents[2] / "configs" / "models"
pytestmark = pytest.mark.timeout(300)

PUBLISHED = Path(__file__).parents[1] / "port" / "verl_scripts" / "models"
SP = {"sequence_parallel": True}
MOONLIGHT = {
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
    "num_layers_in_first_pipeline_stage": 14,
    "num_layers_in_last_pipeline_stage": 13,
}

# (model, ranks, TP, PP, further sizes)
LAYOUTS = [
    ("llama-2-7b", 1, 1, 1, {}),
    ("llama-2-7b", 8, 2, 2, {}),
    ("llama-2-7b", 8, 8, 1, {"sequence_parallel": True}),
    ("llama-2-7b", 8, 1, 8, {}),
    ("llama-2-7b", 8, 2, 4, {"virtual_pipeline_model_parallel_size": 4}),
    ("llama-2-7b", 4, 1, 4, {"num_layers_in_first_pipeline_stage": 5, "num_layers_in_last_pipeline_stage": 3}),
    ("llama-2-7b", 4, 4, 1, {"make_vocab_size_divisible_by": 129}),
    ("llama-2-13b", 8, 4, 2, {}),
    ("llama-2-13b", 10, 2, 5, {}),
    ("llama-2-13b", 8, 2, 4, {"virtual_pipeline_model_parallel_size": 2}),
    ("llama-2-13b", 8, 8, 1, {}),
    ("llama-2-70b", 32, 8, 4, {}),
    ("llama-3-70b", 64, 8, 4, {}),
    ("llama-3-70b", 64, 8, 8, {"virtual_pipeline_model_parallel_size": 5}),
    ("llama-3-70b", 32, 4, 8, {"sequence_parallel": True}),
    ("llama-3-70b", 16, 8, 2, {"num_layers_in_last_pipeline_stage": 37}),
    ("llama-3-70b", 16, 4, 4, {"num_layers_in_first_pipeline_stage": 17, "num_layers_in_last_pipeline_stage": 21}),
    ("qwen3-30b-a3b", 8, 1, 1, {"expert_model_parallel_size": 8}),
    ("qwen3-30b-a3b", 8, 4, 1, {"expert_model_parallel_size": 2, "sequence_parallel": True}),
    ("qwen3-30b-a3b", 8, 2, 2, {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}),
    ("qwen3-30b-a3b", 16, 4, 2, {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2}),
    ("qwen3-30b-a3b", 16, 2, 4, {"virtual_pipeline_model_parallel_size": 3, "expert_model_parallel_size": 2}),
    ("qwen3-30b-a3b", 4, 2, 2, {"num_layers_in_first_pipeline_stage": 20}),
    ("qwen2-moe", 8, 2, 2, {"expert_model_parallel_size": 2, "sequence_parallel": True}),
    ("moonlight", 8, 4, 2, SP | MOONLIGHT),
    ("DeepSeek-V3", 8, 2, 2, SP | {"expert_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 30}),
    ("GLM-4.5-Air-Base", 4, 2, 2, SP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    ("gemma3", 4, 1, 2, {}),
    ("qwen3-next", 8, 2, 2, SP | {"expert_model_parallel_size": 2}),
    ("qwen3.5-moe", 4, 2, 2, SP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    ("tied", 8, 2, 1, {}),
    ("tied", 8, 2, 4, {}),
]


def model_folder(name: str, folder: Path) -> Path:
    """One of the shapes that come with the project, or a small one with one matrix at both ends."""
    if (PUBLISHED / name).is_dir():
        return PUBLISHED / name
    if name == "gemma3":
        return gemma3_folder(folder / name)
    if name in DELTA:
        return delta_folder(folder / name, *DELTA[name])
    if name == "moonlight":
        return moonlight_folder(folder / name)
    if name == "qwen2-moe":
        return qwen2_moe_folder(folder / name)
    if name != "tied":
        return MODELS / name
    settings = json.loads((MODELS / "llama-3-8b" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True, "num_hidden_layers": 8}))
    return folder


def qwen2_moe_folder(folder: Path) -> Path:
    """Qwen1.5-MoE-A2.7B's sizes, with dense layers in both halves."""
    settings = Qwen2MoeConfig(architectures=["Qwen2MoeForCausalLM"], mlp_only_layers=[1, 13]).to_dict()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def gemma3_folder(folder: Path) -> Path:
    """Gemma-3-1B's sizes, as they are published: what is usual in the family is left out."""
    settings = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152}
    settings |= {"intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 26}
    settings |= {"sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144, "rope_theta": 1000000}
    settings |= {"max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


DELTA = {
    "qwen3-next": (Qwen3NextConfig, "Qwen3NextForCausalLM"),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, "Qwen3_5MoeForCausalLM"),
}
"""transformers' defaults are the sizes of Qwen3-Next-80B-A3B and of Qwen3.5-35B-A3B's language model."""


def delta_folder(folder: Path, config: type[PreTrainedConfig], architecture: str) -> Path:
    """Layers of the gated delta rule, three to one of attention."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(architectures=[architecture]).to_dict()))
    return folder


@pytest.mark.parametrize(("name", "published"), [("qwen3-next", 79_674_391_296), ("qwen3.5-moe", 34_660_610_688)])
def test_models_with_linear_layers_have_transformers_parameters(name, published, tmp_path) -> None:
    """As many as transformers' own model on meta, without its multi-token prediction. Would not catch swapped sizes."""
    config, architecture = DELTA[name]
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config(architectures=[architecture]))
    read = ModelFolder(str(delta_folder(tmp_path / name, config, architecture))).model
    assert read.num_params == sum(parameter.numel() for parameter in model.parameters()) == published


def moonlight_folder(folder: Path) -> Path:
    """Moonlight-16B-A3B's sizes: a DeepSeek-V3 whose queries come straight from the hidden state."""
    settings = json.loads((PUBLISHED / "DeepSeek-V3" / "config.json").read_text())
    settings |= {"hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16}
    settings |= {"intermediate_size": 11264, "moe_intermediate_size": 1408, "q_lora_rank": None, "vocab_size": 163840}
    settings |= {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings | {"first_k_dense_replace": 1}))
    return folder


def counts_of_real_models(folder: str, world_size: int, megatron: MegatronConfig) -> dict[int, tuple[int, int]]:
    """Rank -> (parameters of the language model, of the value model), of every rank, one after the other."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig

    from megatron_rl.device import Device
    from megatron_rl.model.gpt import build_language_model, build_value_model, transformer_config
    from megatron_rl.parallel.mpu import initialize_mpu
    from third_party_patches import apply_patches

    apply_patches("cpu")
    grid, hf_config = grid_of(world_size, megatron), AutoConfig.from_pretrained(folder)
    found = {}
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        groups = initialize_mpu(grid, 1, vpp_size=megatron.virtual_pipeline_model_parallel_size or 1)
        config = transformer_config(hf_config, groups, megatron, Device("cpu"))
        vocab = vocab_multiple(megatron.make_vocab_size_divisible_by, grid.tp_size)
        with OnMeta():
            policy = build_language_model(hf_config, config, groups, vocab)
            critic = build_value_model(hf_config, config, groups, vocab, head_seed=1)
        found[rank] = (num_parameters(policy), num_parameters(critic))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return found


class OnMeta(torch.overrides.TorchFunctionMode):
    """While active, weights are created on meta; the value head, which is drawn, and rotary frequencies are not."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in (torch.empty, torch.ones):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def num_parameters(chunks: list[torch.nn.Module]) -> int:
    """Of all chunks, nearly all of them on meta."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    assert sum(parameter.numel() for parameter in parameters if parameter.device.type != "meta") < 10**5
    return sum(parameter.numel() for parameter in parameters)


def grid_of(world_size: int, megatron: MegatronConfig) -> TrainGrid:
    return TrainGrid(
        world_size,
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.expert_model_parallel_size,
        megatron.expert_tensor_parallel_size,
    )


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_rank_has_the_planned_number_of_parameters(tmp_path, every: int):
    """30 layouts of 11 models, or every fourth of them: equal to the last one, on every rank, of policy and critic.

    Would not catch a parameter that Megatron adds later than in the constructor.
    """
    jobs = []
    for name, world_size, tp_size, pp_size, sizes in LAYOUTS[::every]:
        megatron = MegatronConfig(tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size, **sizes)
        jobs.append((str(model_folder(name, tmp_path)), world_size, megatron))
    (answers,) = run_ranks(1, all_counts, jobs, timeout=280)
    for (folder, world_size, megatron), real in zip(jobs, answers, strict=True):
        settings = json.loads((Path(folder) / "config.json").read_text())
        family, shape = family_of(settings["architectures"]), shape_of(settings)
        stages, grid = StagePlan.from_config(shape.num_layers, megatron), grid_of(world_size, megatron)
        vocab = vocab_multiple(megatron.make_vocab_size_divisible_by, grid.tp_size)
        policy = TrainedWeights(ModelParams(param_map(family, shape)), stages, grid, vocab)
        critic = TrainedWeights(ModelParams(value_param_map(family, shape)), stages, grid, vocab)
        assert real.keys() == set(range(world_size))
        for rank, (policy_params, critic_params) in real.items():
            assert policy.num_params(grid.pp_rank(rank)) == policy_params, (folder, megatron, rank)
            assert critic.num_params(grid.pp_rank(rank)) == critic_params, (folder, megatron, rank)


def all_counts(jobs) -> list[dict]:
    return [counts_of_real_models(*job) for job in jobs]
