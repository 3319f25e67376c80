"""A reference that follows its policy, on the same ranks or in another pool: what it becomes, and that a checkpoint has
it, for every layout.

Why bit for bit: the reference is written and read without arithmetic, as the policy is, and a refresh is a function of
the two. Not exercised: when a run refreshes, which tests/e2e/test_stage_runs.py resumes.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from joined_pools import killed_after
from pool_messages import Messages, host_of
from ranks import run_ranks
from resumed_training import start_saving
from task_cases import answer_batch, task_config
from tiny_models import save_glm4_moe, save_qwen3_moe
from updates import whole_weights

from megatron_rl.checkpoint.saved_tensors import SavedTensors
from megatron_rl.columns import SCORING
from megatron_rl.config.schema import PoolConfig
from megatron_rl.config.tasks import DPO
from megatron_rl.planning.follower_transfers import follower_transfers
from megatron_rl.planning.run_models import RunModels
from megatron_rl.records import answer_rows

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

PROMPTS = (2,) * 6
BF16 = {"actor_rollout_ref__actor__megatron__dtype": "bfloat16"}
EP2 = {"actor_rollout_ref__actor__megatron__expert_model_parallel_size": 2}
TP2 = {"actor_rollout_ref__actor__megatron__sequence_parallel": True}
SPLIT = EP2 | {
    "actor_rollout_ref__actor__megatron__sequence_parallel": True,
    "actor_rollout_ref__actor__megatron__expert_tensor_parallel_size": 1,
}


def config_of(path: str, tp_size: int, pp_size: int, alpha: float = 0.25, **keys):
    followed = {"actor_rollout_ref__ref__sync_ref_model": True, "actor_rollout_ref__ref__ref_model_mixup_alpha": alpha}
    return task_config(path, DPO, tp_size, pp_size, dpo__reference="on_the_fly", **followed, **keys)


def refreshed(config, num_refreshes: int, source: Path | None = None, target: Path | None = None) -> dict:
    """Load `source`, take an update and a refresh so often, save to `target`: what one rank then knows.

    mixed: whether each refresh gave just the mixture of what there was before. apart: whether the two roles differ.
    """
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    worker.build("reference")
    policy, reference, where = worker.roles["actor"], worker.roles["reference"], worker.coordinates()
    weights = {
        "policy": named_parameters(policy.trainable.models),
        "reference": named_parameters(reference.model.models),
    }

    def held(role: str) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in weights[role].items()}

    def biases() -> dict[str, dict[str, torch.Tensor]]:
        every = {"policy": policy.checkpoint.bias, "reference": policy.checkpoint.reference.bias}
        return {name: bias.whole() for name, bias in every.items() if bias is not None}

    if source is not None:
        states = pickle.loads((source / "states.pickle").read_bytes())
        policy.checkpoint.load(source / "actor", states["actor"])
    rows = torch.arange(len(PROMPTS)).tensor_split(where.dp_size)[where.dp_rank]
    mine = answer_batch(PROMPTS, score_token=False)[rows]
    mixed, moves, alpha = [], [biases()], config.actor_rollout_ref.ref.ref_model_mixup_alpha
    for _ in range(num_refreshes):
        worker.run("actor", "update_preferences", (mine, len(PROMPTS)), {})
        before, now = held("reference"), held("policy")
        worker.run("reference", "refresh", (), {})
        mixed += [torch.equal(weights["reference"][name], before[name].lerp(now[name], alpha)) for name in now]
        moves.append(biases())
    if target is not None:
        assert start_saving(worker, target).finish(wait=True)
    scores = reference.log_probs(answer_rows(mine).read_by(SCORING)), policy.answer_log_probs(mine)
    return {
        "where": where,
        "place": policy.source.place,
        "mixed": all(mixed),
        "biases": moves,
        "apart": any(not torch.equal(held("policy")[name], tensor) for name, tensor in held("reference").items()),
        "scores": [None if one is None else one.flat(one.names[0]).sum() for one in scores],
        "actor_weights": held("reference"),  # the policy's names
    }


@pytest.mark.parametrize(
    ("layout", "keys"),
    [((2, 1, 1), EP2 | BF16), pytest.param((4, 2, 2), SPLIT, marks=pytest.mark.exhaustive)],
    ids=["DP2xEP2-bf16", "TP2xPP2xEP2"],
)
def test_a_moved_reference_is_in_the_checkpoint(layout, keys, tmp_path: Path) -> None:
    """Two refreshes, each the mixture to the last bit; then one process, and the same layout, begin with just that.

    Experts, and a head tied to the embedding that the last stage holds. Would not catch a reference that is not asked.
    """
    path, saved = save_qwen3_moe(tmp_path, tie_word_embeddings=True), tmp_path / "saved"
    world_size, *cut = layout
    whole = run_ranks(world_size, refreshed, config_of(path, *cut, **keys), 2, None, saved)
    assert all(rank["mixed"] for rank in whole)
    tensors, expected = SavedTensors(saved / "actor"), whole_weights(whole, "actor", path)
    assert {f"optimizer.state.reference.{name}" for name in tensors.weights} <= set(tensors.names)
    assert all(rank["apart"] for rank in whole)
    dtype = {key: value for key, value in keys.items() if key in BF16}
    for ranks, config in ((1, config_of(path, 1, 1, **dtype)), (world_size, config_of(path, *cut, **keys))):
        found = whole_weights(run_ranks(ranks, refreshed, config, 0, saved), "actor", path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("layout", "keys"),
    [((2, 1, 1), EP2), pytest.param((2, 1, 2), {}, marks=pytest.mark.exhaustive)],
    ids=["EP2", "PP2"],
)
def test_biases_of_experts_follow(layout, keys, tmp_path: Path) -> None:
    """By the share of each refresh, from the folder's on; another layout resumes with just those, and with the
    policy's. Would not catch a refresh that a run forgets.
    """
    path, saved = save_glm4_moe(tmp_path), tmp_path / "saved"
    world_size, *cut = layout
    whole = run_ranks(world_size, refreshed, config_of(path, *cut, **MOVING, **keys), 2, None, saved)
    (again,) = run_ranks(1, refreshed, config_of(path, 1, 1, **MOVING), 0, saved)
    first, *later = whole[0]["biases"]
    assert first["reference"] and any(
        not torch.equal(later[-1]["policy"][name], first["policy"][name]) for name in first["policy"]
    )
    for name, before in first["reference"].items():
        assert torch.equal(before, first["policy"][name])
        for moves in later:
            before = before.lerp(moves["policy"][name], 0.25)
            assert torch.equal(moves["reference"][name], before), name
        assert not torch.equal(before, later[-1]["policy"][name])
        for role in ("policy", "reference"):
            assert torch.equal(again["biases"][0][role][name], later[-1][role][name]), (role, name)
    assert again["scores"][0].item() == pytest.approx(
        sum(rank["scores"][0] for rank in whole if rank["scores"][0] is not None).item(), rel=1e-5
    )


def test_the_whole_share_makes_the_reference_the_policy(tmp_path: Path) -> None:
    """a = 1: the same log-probs; a checkpoint before the first refresh has no reference, which then is the folder's.

    Would not catch another order of update and refresh.
    """
    path = save_qwen3_moe(tmp_path)
    (one,) = run_ranks(1, refreshed, config_of(path, 1, 1, alpha=1.0), 1)
    reference, policy = one["scores"]
    assert one["mixed"] and reference.item() == pytest.approx(policy.item(), rel=1e-6)
    (fresh,) = run_ranks(1, refreshed, config_of(path, 1, 1), 0, None, tmp_path / "saved")
    assert not any("reference" in name for name in SavedTensors(tmp_path / "saved" / "actor").names)
    (again,) = run_ranks(1, refreshed, config_of(path, 1, 1), 0, tmp_path / "saved")
    assert again["scores"][0] == fresh["scores"][0]


def apart_config(path: str, num_ranks: int, tp_size: int, pp_size: int, following: dict, **keys):
    """The actor's layout, and of the pool of the reference its ranks and keys of its layout."""
    layout = {f"actor_rollout_ref__ref__megatron__{key}": value for key, value in following.items()}
    config = config_of(path, tp_size, pp_size, **layout, **keys)
    config.pools["ref"] = PoolConfig(nnodes=1, n_gpus_per_node=num_ranks)
    config.actor_rollout_ref.ref.pool = "ref"
    return config


def apart(
    config,
    num_training: int,
    num_refreshes: int,
    source: Path | None = None,
    target: Path | None = None,
    dies: bool = False,
) -> dict:
    """One rank of either pool: what its role has at first and after each refresh, and the reports of the transfers.

    dies: in one more transfer the last rank of all is lost.
    """
    from megatron_rl.roles.model_source import named_parameters

    messages, number = Messages(), int(os.environ["RANK"])
    trains, num_ranks = number < num_training, int(os.environ["WORLD_SIZE"])
    place = (
        ("global_pool", number, num_training) if trains else ("ref", number - num_training, num_ranks - num_training)
    )
    worker = host_of(config, *place, place[0])
    name = "actor" if trains else "reference"
    worker.build(name)
    role, where = worker.roles[name], worker.coordinates()
    if number == 0:
        messages.say("address", pickle.dumps(role.offer_to("reference", num_ranks - num_training)))
    address = pickle.loads(messages.store.get("address"))
    if trains:
        role.join_follower("reference", address)
    else:
        role.join_policy(address)
    if source is not None:
        states = pickle.loads((source / "states.pickle").read_bytes()) if trains else {}
        worker.load_checkpoint(source, states)
    parameters = named_parameters(role.trainable.models if trains else role.model.models)
    bias = role.checkpoint.bias if trains else role.arriving.refresh.bias

    def held() -> dict:
        weights = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        return {"actor_weights": weights, "place": role.source.place if trains else worker.rank.source(role.spec).place}

    rows = torch.arange(len(PROMPTS)).tensor_split(where.dp_size)[where.dp_rank]
    mine = answer_batch(PROMPTS, score_token=False)[rows]
    found, biases, reports = [held()], [bias and bias.whole()], []
    for step in range(1, num_refreshes + 1):
        if trains:
            worker.run("actor", "update_preferences", (mine, len(PROMPTS)), {})
            reports.append(worker.run("actor", "send_to", ("reference", step), {}))
        else:
            reports.append(worker.run("reference", "take_weights", (step,), {}))
        found.append(held())
        biases.append(bias and bias.whole())
    if target is not None:
        assert start_saving(worker, target).finish(wait=True)
    return {"found": found, "biases": biases, "reports": reports} | (
        broken_transfer(worker, role, held) if dies else {}
    )


def broken_transfer(worker, role, held) -> dict:
    """The last rank of all is killed at its second message: what the others raise, and whether weights stay."""
    from megatron_rl.hybrid_engine.weight_transfer import BrokenTransferError

    before, sends = held(), worker.spec.name == "global_pool"
    if not sends and worker.groups.rank == worker.groups.grid.world_size - 1:
        killed_after(role.arriving.transport, 1)
    with pytest.raises(BrokenTransferError) as raised:
        worker.run(role.spec.name, *(("send_to", ("reference", 9), {}) if sends else ("take_weights", (9,), {})))
    after = held()["actor_weights"]
    stay = all(torch.equal(after[name], tensor) for name, tensor in before["actor_weights"].items())
    return {"error": str(raised.value), "stay": stay}


@pytest.mark.exhaustive
def test_a_rank_lost_in_a_transfer_leaves_all_weights(tmp_path: Path) -> None:
    """One of two ranks of the reference's pool is killed; both pools' others say that the transfer broke, and their
    weights are those from before. Would not catch what the driver makes of it; tests/e2e/test_actor_only.py does.
    """
    num_ranks, (world_size, *cut), following, keys = LAYOUTS["EP2 to PP2"]
    config = apart_config(save_qwen3_moe(tmp_path), num_ranks, *cut, following, **keys)
    ranks = run_ranks(world_size + num_ranks, apart, config, world_size, 1, None, None, True, lost=[3])
    for rank in ranks[:3]:
        assert rank["stay"] and "a transfer of weights broke" in rank["error"]


GROUP = "actor_rollout_ref__actor__megatron__override_transformer_config__moe_router_"
MOVING = {f"{GROUP}enable_expert_bias": True, f"{GROUP}bias_update_rate": 0.25}
LAYOUTS = {
    "EP2 to PP2": (2, (2, 1, 1), {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1}, EP2),
    "PP2 to EP2, with biases": (
        2,
        (2, 1, 2),
        {"pipeline_model_parallel_size": 1, "expert_model_parallel_size": 2},
        MOVING,
    ),
    "DP2xEP2-bf16 to TP2": (
        2,
        (2, 1, 1),
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 2},
        EP2 | BF16,
    ),
    "TP2xPP2xEP2 to DP4xEP2": (
        4,
        (4, 2, 2),
        {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False},
        SPLIT,
    ),
}
"""Ranks of the reference's pool, the actor's ranks, TP and PP, keys of the reference's layout, keys of all."""


@pytest.mark.parametrize(
    "layout",
    [
        name if name == "PP2 to EP2, with biases" else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in LAYOUTS
    ],
)
def test_a_reference_in_another_pool_follows(layout: str, tmp_path: Path) -> None:
    """Two refreshes between two layouts: every element and bias is the mixture, the bytes are those of the plan, and
    one process, and both pools again, resume with just that. Experts, and a tied head.

    Would not catch a driver that calls at another step; tests/e2e/test_actor_only.py does.
    """
    num_ranks, (world_size, *cut), following, keys = LAYOUTS[layout]
    has_biases, saved = MOVING.items() <= keys.items(), tmp_path / "saved"
    path = save_glm4_moe(tmp_path) if has_biases else save_qwen3_moe(tmp_path, tie_word_embeddings=True)
    config = apart_config(path, num_ranks, *cut, following, **keys)
    ranks = run_ranks(world_size + num_ranks, apart, config, world_size, 2, None, saved)
    training, reference = ranks[:world_size], ranks[world_size:]
    policy, follows = (
        [whole_weights([rank["found"][number] for rank in pool], "actor", path) for number in range(3)]
        for pool in (training, reference)
    )
    for number in (1, 2):
        for name, tensor in follows[number].items():
            assert torch.equal(tensor, follows[number - 1][name].lerp(policy[number][name], 0.25)), name
        for name, bias in (reference[0]["biases"][number] or {}).items():
            before, leader = reference[0]["biases"][number - 1][name], training[0]["biases"][number][name]
            assert torch.equal(bias, before.lerp(leader, 0.25)) and not torch.equal(bias, before)
    (transfer,) = follower_transfers(RunModels(config))
    for number in range(2):
        reports = [rank["reports"][number] for rank in reference]
        assert [report.bytes_received for report in reports] == list(transfer.received)
        assert all(report.bytes_received == report.lower_bound_bytes for report in reports)
        assert sum(rank["reports"][number].bytes_sent for rank in training) == transfer.model_bytes
    like = {key: value for key, value in keys.items() if key in BF16 | MOVING}
    alone = run_ranks(1, refreshed, config_of(path, 1, 1, **like), 0, saved)
    again = run_ranks(world_size + num_ranks, apart, config, world_size, 0, saved)
    resumed = [rank["found"][0] for rank in again[world_size:]]
    for found in (whole_weights(alone, "actor", path), whole_weights(resumed, "actor", path)):
        assert all(torch.equal(found[name], follows[2][name]) for name in follows[2])
    for name, bias in (reference[0]["biases"][2] or {}).items():
        assert torch.equal(again[-1]["biases"][0][name], bias)
        assert torch.equal(alone[0]["biases"][0]["reference"][name], bias)


def followed_by_adapters(config, source: Path | None = None, target: Path | None = None) -> dict:
    """Of one rank, sums of log-probs of its rows: the reference's when it begins and after a refresh, the policy's at
    that refresh and after one more update. With `source` nothing is updated.
    """
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("reference")
    policy, reference, where = worker.roles["actor"], worker.roles["reference"], worker.coordinates()
    rows = torch.arange(len(PROMPTS)).tensor_split(where.dp_size)[where.dp_rank]
    mine = answer_batch(PROMPTS, score_token=False)[rows]

    def reference_scores() -> torch.Tensor:
        return reference.log_probs(answer_rows(mine).read_by(SCORING)).flat("ref_log_probs").sum()

    def policy_scores() -> torch.Tensor:
        return policy.answer_log_probs(mine).flat("answer_scores").sum()

    found = {"bare": policy_scores(), "first": reference_scores()}
    if source is not None:
        states = pickle.loads((source / "states.pickle").read_bytes())
        policy.checkpoint.load(source / "actor", states["actor"])
        return found | {"reference": reference_scores(), "policy": policy_scores()}
    for _ in range(2):
        worker.run("actor", "update_preferences", (mine, len(PROMPTS)), {})
    worker.run("reference", "refresh", (), {})
    found["at refresh"] = policy_scores()
    worker.run("actor", "update_preferences", (mine, len(PROMPTS)), {})
    if target is not None:
        assert start_saving(worker, target).finish(wait=True)
    return found | {"reference": reference_scores(), "policy": policy_scores()}


def test_a_reference_follows_adapters(tmp_path: Path) -> None:
    """It is the base until a refresh, then the policy at that refresh, also out of a checkpoint in another layout.

    Would not catch adapters of experts, which are held in the same way.
    """
    path, saved = save_qwen3_moe(tmp_path), tmp_path / "saved"
    lora = {"actor_rollout_ref__model__lora__rank": 4}
    (one,) = run_ranks(1, followed_by_adapters, config_of(path, 1, 1, alpha=1.0, **lora), None, saved)
    for ours, theirs in (("first", "bare"), ("reference", "at refresh")):
        assert one[ours].item() == pytest.approx(one[theirs].item(), rel=1e-6), ours
    assert abs(one["bare"] - one["at refresh"]) > 0.1 < abs(one["at refresh"] - one["policy"])
    names = SavedTensors(saved / "actor").names
    assert any("reference" in name and "lora" in name for name in names)
    found = run_ranks(2, followed_by_adapters, config_of(path, 2, 1, alpha=1.0, **TP2, **lora), saved)
    for rank in found:
        for name in ("first", "reference", "policy"):
            assert rank[name].item() == pytest.approx(one[name].item(), rel=1e-5), name
