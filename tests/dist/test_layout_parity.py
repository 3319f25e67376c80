"""One batch, one update: log-probs, values, losses, gradient norms and new weights are the same in every layout."""

from __future__ import annotations

from itertools import chain
from types import MappingProxyType

import pytest
import torch
from ranks import run_ranks
from tiny_models import random_experience, run_config, save_llama, save_qwen2

from megatron_rl.config.schema import RunConfig
from megatron_rl.parallel.stages import StagePlan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

VPP2 = {"virtual_pipeline_model_parallel_size": 2}
LAYOUTS = {
    "TP2": (2, 2, 1),
    "PP2": (2, 1, 2),
    "TP2xPP2": (4, 2, 2),
    "TP2xDP2": (4, 2, 1),
    "DP2": (2, 1, 1),
    "PP2xVPP2": (2, 1, 2, VPP2),
    "TP2xPP2xVPP2": (4, 2, 2, VPP2),
    "PP2xDP2xVPP2": (4, 1, 2, VPP2),
    "stages of 1, 3": (2, 1, 2, {"num_layers_in_first_pipeline_stage": 1}),
    "stages of 2, 1, 1": (3, 1, 3, {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1}),
}
"""Name -> ranks, then the arguments of layout_config after the model."""
# In micro-batches of 4: 3 of them without DP, which the interleaved schedule fills up to 4, and 2 with DP2.
NUM_ROWS = 11
# Adam divides by the root of the squared gradient, which blows rounding noise up wherever the true gradient is zero.
# With a large epsilon the step is proportional to the gradient, so comparing new weights compares gradients.
OPTIMIZER = {"lr": 0.05, "eps": 1.0, "weight_decay": 0.0, "clip_grad": 1.0}


def one_update(config) -> dict:
    """What one rank knows after scoring the batch, one update of actor and critic, and scoring it again."""
    from megatron_rl.workers.model_source import named_parameters
    from megatron_rl.workers.rank_worker import RankWorker

    worker = RankWorker(config)
    worker.build_actor()
    worker.build_critic()
    worker.build_reference()
    where = worker.coordinates()
    experience = random_experience(NUM_ROWS)
    rows = torch.arange(NUM_ROWS).tensor_split(where.dp_size)[where.dp_rank]
    mine = experience[rows]

    def score(verb) -> torch.Tensor | None:
        scores = verb(mine.sequences())
        return None if scores is None else scores.scores.values()

    result = {"where": where, "log_probs": score(worker.compute_log_probs), "values": score(worker.compute_values)}
    result["ref_log_probs"] = score(worker.compute_ref_log_probs)
    old = score(worker.compute_log_probs)
    # Stages before the last never compute log-probs; their loss closures do not run, so any values do.
    shape_only = mine.advantages.values() * 0
    mine.old_log_probs = mine.advantages.clone()
    mine.old_log_probs.values().copy_((shape_only if old is None else old) - 0.1 * mine.advantages.values())
    result["actor"] = worker.update_actor(mine.actor_batch())
    result["critic"] = worker.update_critic(mine.critic_batch())
    result["log_probs_after"] = score(worker.compute_log_probs)
    result["values_after"] = score(worker.compute_values)
    for role, trainable in (("actor", worker.actor.trainable), ("critic", worker.critic.trainable)):
        parameters = named_parameters(trainable.models)
        result[f"{role}_weights"] = {name: p.detach().clone() for name, p in parameters.items()}
    result["place"] = (worker.groups.tp_rank, worker.groups.pp_rank, worker.groups.dp_rank)
    return result


def collected(results: list[dict], field: str) -> torch.Tensor:
    """The flat scores of the whole batch from the data-parallel collectors, in row order."""
    parts = sorted((r["where"].dp_rank, r[field]) for r in results if r["where"].dp_collector)
    return torch.cat([part for _, part in parts])


def whole_weights(results: list[dict], role: str) -> dict[str, torch.Tensor]:
    """Unsharded, unfused weights under HF names (the value head under its own)."""
    from megatron_rl.checkpoint.hf_export import WholeTensors, owners_of
    from megatron_rl.model.families import FAMILIES, ModelShape, param_map
    from megatron_rl.parallel.sharding import Place

    specs = param_map(FAMILIES["Qwen2ForCausalLM"], ModelShape(4, 128, 4, 2, 32, 192, 70, tied=True))
    tp_size = 1 + max(r["place"][0] for r in results)
    held = {rank: r[f"{role}_weights"] for rank, r in enumerate(results)}
    places = {rank: Place(r["place"][0], tp_size, vocab_multiple=64) for rank, r in enumerate(results)}
    whole = WholeTensors()
    for name in sorted({name for weights in held.values() for name in weights}):
        holders = [rank for rank, weights in held.items() if name in weights]
        if role == "critic" and name == "output_layer.weight":
            whole.tensors["value_head"] = held[holders[0]][name]
            continue
        for rank in owners_of(specs[name], holders, places):
            whole.add(specs[name], places[rank], held[rank][name])
    return whole.tensors


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


def layout_config(
    model_path: str, tp_size: int, pp_size: int, keys: dict = MappingProxyType({}), micro_batch: int = 4
) -> RunConfig:
    """`keys`: more of the actor's megatron group, which the other roles follow."""
    optimizer = {f"actor_rollout_ref__actor__optim__{key}": value for key, value in OPTIMIZER.items()}
    optimizer |= {f"critic__optim__{key}": value for key, value in OPTIMIZER.items()}
    sizes = {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in keys.items()}
    sizes["actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"] = micro_batch
    sizes["actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu"] = micro_batch
    return run_config(model_path, tp_size, pp_size, **optimizer, **sizes)


@pytest.fixture(scope="module")
def reference(model_path) -> list[dict]:
    return run_ranks(1, one_update, layout_config(model_path, 1, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout: str, model_path: str, reference: list[dict]) -> None:
    """Would not catch an error that every layout shares with the single process (the HF test does that)."""
    world_size, *sizes = LAYOUTS[layout]
    config = layout_config(model_path, *sizes)
    results = run_ranks(world_size, one_update, config)
    assert_same(results, reference)
    stages = StagePlan.from_config(4, config.actor_rollout_ref.actor.megatron)
    for r in results:
        layers = {int(name.split(".")[2]) for name in r["actor_weights"] if name.startswith("decoder.layers.")}
        assert layers == set(chain(*stages.layers(r["place"][1])))


def test_fewer_micro_batches_than_stages(model_path: str, reference: list[dict]) -> None:
    """All rows in one micro-batch, filled up to 2 stages. Would not catch filler that only costs time."""
    assert_same(run_ranks(2, one_update, layout_config(model_path, 1, 2, VPP2, micro_batch=16)), reference)


def assert_same(results: list[dict], reference: list[dict]) -> None:
    """Scores, metrics and new weights of a run equal those of one process to 1e-5."""
    for field in ("log_probs", "ref_log_probs", "values", "log_probs_after", "values_after"):
        assert relative(collected(results, field), collected(reference, field)) < 1e-5, field
    for role in ("actor", "critic"):
        expected = reference[0][role]
        ours = next(r[role] for r in results if r["where"].dp_collector)
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        assert all(r[role][f"{role}/grad_norm"] == pytest.approx(expected[f"{role}/grad_norm"]) for r in results)
        weights, expected_weights = whole_weights(results, role), whole_weights(reference, role)
        assert weights.keys() == expected_weights.keys()
        for name, tensor in expected_weights.items():
            assert relative(weights[name], tensor) < 1e-5, name


def test_update_changes_what_it_should(model_path: str, reference: list[dict]) -> None:
    """Guards the test above against comparing nothing; would not catch an update in the wrong direction."""
    from safetensors.torch import load_file

    before = load_file(f"{model_path}/model.safetensors")
    after = whole_weights(reference, "actor")
    assert set(after) == set(before)
    unchanged = [name for name, tensor in before.items() if torch.equal(tensor, after[name])]
    assert unchanged == []
    assert relative(collected(reference, "log_probs_after"), collected(reference, "log_probs")) > 1e-4


@pytest.mark.parametrize("save_model", [save_qwen2, save_llama])
def test_log_probs_equal_hugging_face(save_model, tmp_path) -> None:
    """TP2xPP2 against transformers on the same folder; would not catch an error common to the sampled rows only."""
    from transformers import AutoModelForCausalLM

    path = save_model(tmp_path)
    results = run_ranks(4, score_only, run_config(path, 2, 2))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    experience = random_experience(NUM_ROWS)
    expected = []
    with torch.no_grad():
        for ids, length in zip(experience.input_ids.unbind(), experience.response_lengths.tolist(), strict=True):
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
            expected.append(log_probs.gather(-1, ids[1:, None])[-length:, 0])
    ours = next(scores for scores in results if scores is not None)
    assert (ours - torch.cat(expected)).abs().max() < 2e-5


def score_only(config) -> torch.Tensor | None:
    from megatron_rl.workers.rank_worker import RankWorker

    worker = RankWorker(config)
    worker.build_actor()
    scores = worker.compute_log_probs(random_experience(NUM_ROWS).sequences())
    return None if scores is None else scores.scores.values()
