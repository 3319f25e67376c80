"""Adapters go out as PEFT's folder and as a merged model, and come in again, in every layout; PEFT is the oracle.

Why the layout cannot matter: a folder has whole tensors, of which a rank holds boxes; a merged shard needs the rank's
own boxes alone, because an adapter is cut as its linear is. Not exercised: folders that PEFT writes in several files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from image_observations import expected_log_probs, rows_with_features
from ranks import run_ranks
from rollout_checks import GREEDY, greedy_answers, round_trip, tokens
from safetensors.torch import load_file
from sweeps import WEEKLY
from tiny_gemma4 import save_gemma4_with_keys_for_values
from tiny_models import (
    random_batch,
    run_config,
    save_deepseek_v3,
    save_llama,
    save_mixtral,
    save_qwen2,
    save_qwen2_moe,
    save_qwen3,
    save_qwen3_moe,
    save_reward_model,
)
from tiny_vision import save_gemma3_vision, save_qwen3_5_vision
from vision_folders import save_qwen3_vl_folder, save_qwen25_vl_folder

from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE, SCORING
from megatron_rl.controller.report import hf_model, hf_sampled_logits

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS = 6
LORA = "actor_rollout_ref__model__lora__"
RANK6 = {f"{LORA}rank": 6, f"{LORA}alpha": 24.0, "actor_rollout_ref__actor__optim__lr": 1e-2}
"""vLLM's next rank is 8, so that memory holds two rows more than a folder."""
CRITIC = {name.replace("actor_rollout_ref__", "critic__").replace("__actor__", "__"): x for name, x in RANK6.items()}
HEAD = "base_model.model.score.weight"
SP_VPP2 = {
    "actor_rollout_ref__actor__megatron__sequence_parallel": True,
    "actor_rollout_ref__actor__megatron__virtual_pipeline_model_parallel_size": 2,
}
EP2 = {
    "actor_rollout_ref__actor__megatron__expert_model_parallel_size": 2,
    "actor_rollout_ref__actor__megatron__expert_tensor_parallel_size": 1,
    "actor_rollout_ref__actor__megatron__sequence_parallel": True,
}
SP = {"actor_rollout_ref__actor__megatron__sequence_parallel": True}
OF_LATENT = {f"{LORA}target_modules": ["linear_qkv", "linear_proj"], f"{LORA}merge": True}
BESIDE = {f"{LORA}exclude_modules": ["*.experts.*"]}


def steps(config, folder: Path | None, num_steps: int) -> torch.Tensor | None:
    """Take steps and export to `folder`; the trainer's logits at the end. The export must not change the trainer."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    actor = worker.roles["actor"]
    experience = random_batch(NUM_ROWS)
    experience.add(old_log_probs=experience["advantages"])
    for _ in range(num_steps):
        actor.update(experience.read_by(ACTOR_UPDATE))
    if folder is not None:
        before = [parameter.detach().clone() for parameter in actor.trainable.pipeline.parameters()]
        actor.export_hf(folder / "merged", max_shard_bytes=100_000)
        actor.export_adapter(folder / "adapter")
        after = actor.trainable.pipeline.parameters()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return actor.sampled_logits(experience.read_by(SCORING))


def logits_of(results: list[torch.Tensor | None]) -> torch.Tensor:
    return next(logits for logits in results if logits is not None)


def peft_model(path: str, adapter: Path):
    """PEFT's own reading of the folder."""
    from peft import PeftModel

    return PeftModel.from_pretrained(hf_model(path), adapter).eval()


@torch.no_grad()
def peft_logits(path: str, adapter: Path) -> torch.Tensor:
    """What `hf_sampled_logits` gives, of a base and an adapter."""
    from megatron_rl.records import conversations

    batch, model = random_batch(NUM_ROWS).read_by(SCORING), peft_model(path, adapter)
    sizes = conversations(batch)[1].tolist()
    parts = zip(batch.flat("input_ids").split(sizes), batch.flat("sampled").split(sizes), strict=True)
    return torch.cat([model(ids[None]).logits[0, :-1][sampled[1:]] for ids, sampled in parts])


def merged_by_hand(path: str, adapter: Path, scale: float) -> dict[str, torch.Tensor]:
    weights, pairs = load_file(f"{path}/model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in pairs:
        if name.endswith(".lora_A.weight"):
            weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            if weight not in weights:  # folders of Gemma-3 have names of their own
                weight = weight.replace("model.language_model.", "language_model.model.")
            weights[weight] += scale * pairs[name.replace("lora_A", "lora_B")] @ pairs[name]
    return weights


@pytest.mark.parametrize(
    ("save_model", "layout", "other"),
    [
        (save_qwen2, (4, 2, 2, {}), (1, 1, 1, {})),
        pytest.param(save_llama, (4, 2, 2, SP_VPP2), (2, 2, 1, {}), marks=pytest.mark.exhaustive),
        pytest.param(save_qwen3, (2, 1, 2, {}), (4, 2, 1, {}), marks=pytest.mark.exhaustive),
        pytest.param(save_qwen2_moe, (2, 2, 1, EP2 | BESIDE), (2, 1, 2, BESIDE), marks=pytest.mark.exhaustive),
        pytest.param(save_qwen3_moe, (2, 2, 1, EP2), (2, 1, 2, {}), marks=pytest.mark.exhaustive),
        pytest.param(save_mixtral, (2, 1, 2, {}), (2, 2, 1, EP2), marks=pytest.mark.exhaustive),
        pytest.param(save_deepseek_v3, (4, 2, 2, SP | OF_LATENT), (2, 1, 1, OF_LATENT), marks=pytest.mark.exhaustive),
        pytest.param(save_qwen3_5_vision, (4, 2, 2, SP), (1, 1, 1, {}), marks=pytest.mark.exhaustive),
        pytest.param(save_gemma3_vision, (1, 1, 1, {}), (2, 2, 1, {}), marks=pytest.mark.exhaustive),
        pytest.param(save_gemma4_with_keys_for_values, (2, 2, 1, {}), (2, 1, 2, {}), marks=pytest.mark.exhaustive),
    ],
    ids=[
        "TP2xPP2 to 1",
        "TP2xPP2xVPP2 to TP2",
        "PP2 to TP2xDP2",
        "beside experts: TP2xEP2 to PP2",
        "experts: TP2xEP2 to PP2",
        "experts of other names: PP2 to TP2xEP2",
        "latent attention: TP2xPP2 to DP2",
        "Qwen3.5 inside a larger one: TP2xPP2 to 1",
        "Gemma-3 inside a larger one: 1 to TP2",
        "keys for values: TP2 to PP2",
    ],
)
def test_out_and_in_again(save_model, layout, other, tmp_path) -> None:
    """Trained in one layout, read by PEFT and in another layout: 1e-4 in logits, and the same bytes out once more.

    Would not catch a model whose adapters act on the first layers alone.
    """
    path = save_model(tmp_path / "model")
    world_size, tp_size, pp_size, keys = layout
    config = run_config(path, tp_size, pp_size, **RANK6, **keys)
    trained = logits_of(run_ranks(world_size, steps, config, tmp_path / "first", 2))
    adapter = tmp_path / "first/adapter"
    assert all(6 in tensor.shape for tensor in load_file(adapter / "adapter_model.safetensors").values())
    sequences = random_batch(NUM_ROWS).read_by(SCORING)
    assert (hf_sampled_logits(Path(path), sequences) - trained).abs().max() > 1e-2
    assert (hf_sampled_logits(tmp_path / "first/merged", sequences) - trained).abs().max() < 1e-4
    assert (peft_logits(path, adapter) - trained).abs().max() < 1e-4
    whole: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "first/merged").glob("*.safetensors"):
        whole |= load_file(file)
    expected = merged_by_hand(path, adapter, 4.0)
    assert whole.keys() == expected.keys()
    assert all((whole[name] - expected[name]).abs().max() < 1e-6 for name in whole)

    world_size, tp_size, pp_size, keys = other
    config = run_config(path, tp_size, pp_size, **RANK6, **keys, **{f"{LORA}adapter_path": str(adapter)})
    again = logits_of(run_ranks(world_size, steps, config, tmp_path / "second", 0))
    assert (again - trained).abs().max() < 1e-4
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "second/adapter" / name).read_bytes() == (adapter / name).read_bytes()


def image_steps(config, folder: Path, num_steps: int) -> torch.Tensor | None:
    """`steps` on rows with images; log-probs at the end."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    actor, batch = worker.roles["actor"], rows_with_features(worker)
    batch.add(old_log_probs=batch["advantages"])
    for _ in range(num_steps):
        actor.update(batch.read_by(ACTOR_UPDATE))
    actor.export_hf(folder / "merged")
    actor.export_adapter(folder / "adapter")
    scores = actor.log_probs(batch.read_by(SCORING))
    return None if scores is None else scores.flat("old_log_probs")


@pytest.mark.parametrize(
    "save_model", [pytest.param(save, marks=WEEKLY) for save in (save_qwen25_vl_folder, save_qwen3_vl_folder)]
)
def test_out_and_in_again_next_to_images(save_model, tmp_path) -> None:
    """Trained on pictures in TP2xPP2, read by PEFT and merged by transformers on their pixels, and in one process:
    5e-5; the tower stays byte for byte. Would not catch adapters of the tower, which there are none of.
    """
    path = save_model(tmp_path / "model")
    keys = {"data__image_key": "images", f"{LORA}merge": True} | RANK6
    with torch.no_grad():
        trained = logits_of(run_ranks(4, image_steps, run_config(path, 2, 2, **SP, **keys), tmp_path / "first", 2))
        adapter, merged = tmp_path / "first/adapter", tmp_path / "first/merged"
        assert (expected_log_probs(path, hf_model(path)) - trained).abs().max() > 1e-2
        assert (expected_log_probs(path, peft_model(path, adapter)) - trained).abs().max() < 5e-5
        assert (expected_log_probs(path, hf_model(merged)) - trained).abs().max() < 5e-5
    keys[f"{LORA}adapter_path"] = str(adapter)
    again = logits_of(run_ranks(1, image_steps, run_config(path, 1, 1, **keys), tmp_path / "second", 0))
    assert (again - trained).abs().max() < 5e-5
    before, after = load_file(f"{path}/model.safetensors"), dict[str, torch.Tensor]()
    for file in merged.glob("*.safetensors"):
        after |= load_file(file)
    towers = [name for name in before if "visual." in name]
    assert towers and all(torch.equal(before[name], after[name]) for name in towers)
    weights = "adapter_model.safetensors"
    assert (tmp_path / "second/adapter" / weights).read_bytes() == (adapter / weights).read_bytes()


def test_a_folder_that_peft_wrote(tmp_path) -> None:
    """Some projections of some layers, with PEFT's own settings: its logits within 1e-4.

    Would not catch settings that only PEFT's later versions write.
    """
    from peft import LoraConfig, get_peft_model

    path, adapter = save_qwen2(tmp_path / "model"), tmp_path / "adapter"
    settings = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], layers_to_transform=[1, 2], task_type="CAUSAL_LM"
    )
    torch.manual_seed(1)
    model = get_peft_model(hf_model(path), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(adapter)
    targets = [f"*.layers.{layer}.*.{name}" for layer in (1, 2) for name in ("q_proj", "down_proj")]
    keys = {"rank": 4, "alpha": 8.0, "target_modules": targets, "adapter_path": str(adapter)}
    config = run_config(path, 2, 1, **{f"{LORA}{name}": value for name, value in keys.items()})
    ours = logits_of(run_ranks(2, steps, config, tmp_path / "out", 0))
    assert (ours - peft_logits(path, adapter)).abs().max() < 1e-4
    written = tmp_path / "out/adapter"
    theirs = load_file(adapter / "adapter_model.safetensors")
    assert load_file(written / "adapter_model.safetensors").keys() == theirs.keys()
    assert (peft_logits(path, written) - ours).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("save_model", "layout", "keys"),
    [(save_qwen3_moe, (2, 2, 1), EP2), pytest.param(save_mixtral, (1, 1, 1), {}, marks=pytest.mark.exhaustive)],
    ids=["TP2xEP2", "one"],
)
def test_peft_has_all_experts_in_one_parameter(save_model, layout, keys, tmp_path) -> None:
    """Of PEFT's `target_parameters` gate and up share an A here: its logits within 1e-4, and what goes out again is
    PEFT's as well. Would not catch one of both alone.
    """
    from peft import LoraConfig, get_peft_model

    path, adapter = save_model(tmp_path / "model"), tmp_path / "adapter"
    settings = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(1)
    model = get_peft_model(hf_model(path), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(adapter)
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["o_proj", "*.experts.*"], "adapter_path": str(adapter)}
    config = run_config(path, *layout[1:], **keys, **{f"{LORA}{name}": value for name, value in lora.items()})
    ours = logits_of(run_ranks(layout[0], steps, config, tmp_path / "out", 0))
    sequences = random_batch(NUM_ROWS).read_by(SCORING)
    assert (ours - hf_sampled_logits(Path(path), sequences)).abs().max() > 1e-2
    for folder in (adapter, tmp_path / "out/adapter"):
        assert (ours - peft_logits(path, folder)).abs().max() < 1e-4


def generated(config, folder: Path) -> list[list[int]]:
    """What vLLM answers greedily with adapters that were trained here, which are exported."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    experience = random_batch(NUM_ROWS)
    experience.add(old_log_probs=experience["advantages"])
    for _ in range(3):
        worker.roles["actor"].update(experience.read_by(ACTOR_UPDATE))
    answers, _ = round_trip(worker, GREEDY)
    worker.roles["actor"].export_adapter(folder)
    return tokens(answers)


@pytest.mark.exhaustive
def test_peft_answers_as_vllm_does_here(tmp_path) -> None:
    """vLLM and PEFT draw the same greedy tokens. Would not catch a difference too small to change a token."""
    path = save_llama(tmp_path / "model")
    (ours,) = run_ranks(1, generated, run_config(path, 1, 1, **RANK6), tmp_path / "adapter")
    assert ours == greedy_answers(peft_model(path, tmp_path / "adapter"))
    assert ours != greedy_answers(hf_model(path))


def critic_steps(config, folder: Path, num_steps: int) -> torch.Tensor | None:
    """Train a critic as `steps` trains an actor; return its values."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("critic")
    critic, experience = worker.roles["critic"], random_batch(NUM_ROWS)
    for _ in range(num_steps):
        critic.update(experience.read_by(CRITIC_UPDATE))
    critic.export_hf(folder / "merged")
    critic.export_adapter(folder / "adapter")
    values = critic.values(experience.read_by(SCORING))
    return None if values is None else values.flat("old_values")


@pytest.mark.exhaustive
@pytest.mark.parametrize("starts_from_reward_model", [False, True], ids=["drawn head", "given head"])
def test_a_critic_takes_its_head_along(starts_from_reward_model: bool, tmp_path) -> None:
    """PP2 to TP2, by an adapter with PEFT's modules_to_save, which PEFT reads, and as a merged reward model.

    Would not catch a head with a bias, which no family has.
    """
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path / "model"
    path = save_reward_model(folder, "Qwen2") if starts_from_reward_model else save_qwen2(folder)
    first = logits_of(run_ranks(2, critic_steps, run_config(path, 1, 2, **CRITIC), tmp_path / "first", 2))
    adapter = tmp_path / "first/adapter"
    config = run_config(path, 2, 1, **CRITIC, critic__model__lora__adapter_path=str(adapter))
    second = logits_of(run_ranks(2, critic_steps, config, tmp_path / "second", 0))
    assert (first - second).abs().max() < 1e-4
    name = "adapter_model.safetensors"
    assert (tmp_path / "second/adapter" / name).read_bytes() == (adapter / name).read_bytes()

    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, adapter).eval()
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first/merged", dtype=torch.float32).eval()
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert (theirs(ids).logits - merged(ids).logits).abs().max() < 1e-4
    weights = merged_by_hand(path, adapter, 4.0) | {"score.weight": load_file(adapter / name)[HEAD]}
    exported = load_file(tmp_path / "first/merged/model.safetensors")
    assert all((exported[name] - weights[name]).abs().max() < 1e-6 for name in exported)
