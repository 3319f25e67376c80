"""A role that was saved and loaded goes on as if it had never stopped: weights, optimizer, schedule and metrics.

Why, bit for bit in the same layout: a step is a function of weights, masters, moments, schedule and batch, and all of
these are written and read without arithmetic. Why in another layout: a checkpoint has whole tensors, of which each rank
takes its elements, and from there on the argument is that of `tests/parity`. Not exercised: dropout and other
draws of a role, of which there are none.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from sweeps import WEEKLY
from tiny_gpt_oss import save_gpt_oss, save_gpt_oss_in_4_bits
from tiny_minimax import save_minimax
from tiny_models import random_batch, run_config, save_llama, save_qwen2, save_qwen3_moe

from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS = 8
RATES = {"actor_rollout_ref__actor__optim__lr": 1e-3, "critic__optim__lr": 1e-3}


def train(
    config, first: int, last: int, source: Path | None = None, target: Path | None = None, after: int = 0
) -> dict:
    """Load `source`, take steps first to last on actor and critic, save to `target`: what one rank then knows.

    after: the step after which the save begins, and beside which the next ones run; 0: the last.
    """
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("critic")
    where = worker.coordinates()
    if source is not None:
        states = pickle.loads((source / "states.pickle").read_bytes())
        for name, role in worker.trained.items():
            role.checkpoint.load(source / name, states[name])
    metrics, save = [], None
    if target is not None and last < first:
        save = start_saving(worker, target)
    for step in range(first, last + 1):
        metrics.append(take_step(worker, where, step))
        if target is not None and step == (after or last):
            save = start_saving(worker, target)
    if save is not None:
        assert save.finish(wait=True)
    return {
        "metrics": metrics if where.dp_collector else None,
        "state": {name: whole_state(worker, name) for name in worker.trained},
    }


def take_step(worker, where, step: int) -> dict[str, float]:
    """Update actor and critic with the rows of a step that are this rank's: their metrics."""
    batch = random_batch(NUM_ROWS, seed=step)
    batch.add(old_log_probs=batch["advantages"])
    mine = batch[torch.arange(NUM_ROWS).tensor_split(where.dp_size)[where.dp_rank]]
    actor = worker.roles["actor"].update(mine.read_by(ACTOR_UPDATE))
    return actor | worker.roles["critic"].update(mine.read_by(CRITIC_UPDATE))


def start_saving(worker, target: Path):
    """As the controller does it, with the folders and the numbers."""
    from megatron_rl.roles.saving import begin_save

    for name in worker.trained:
        (target / name).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    save = begin_save(target, worker.trained, worker.spec.name, worker.groups, None, worker.device)
    if worker.groups.rank == 0:
        states = {name: role.checkpoint.state for name, role in worker.trained.items()}
        (target / "states.pickle").write_bytes(pickle.dumps(states))
    return save


def whole_state(worker, role: str) -> dict[str, torch.Tensor]:
    """Everything of a role that this rank holds: parameters, and its runs of the optimizer's state."""
    checkpoint = worker.trained[role].checkpoint
    runs = [*checkpoint._weight_runs(), *checkpoint._owned_runs()] if checkpoint.trainable.adam.step else []
    return {f"{run.name}/{run.kind}/{run.start}/{len(run.data)}": run.data.clone() for run in runs}


def metrics_of(results: list[dict]) -> list[dict[str, float]]:
    """The metrics of every step, as the last stage reports them."""
    return next(result["metrics"] for result in results if result["metrics"] is not None)


ACTOR_AND_CRITIC = ("actor_rollout_ref__actor", "critic")
EP2 = {"actor_rollout_ref__actor__megatron__expert_model_parallel_size": 2}
MOE = EP2 | {"actor_rollout_ref__actor__megatron__sequence_parallel": True}
MOE |= {"actor_rollout_ref__actor__megatron__expert_tensor_parallel_size": 1}
SP = {"actor_rollout_ref__actor__megatron__sequence_parallel": True}
BF16 = {"actor_rollout_ref__actor__megatron__dtype": "bfloat16"}
ASYNC = {"actor_rollout_ref__actor__checkpoint__async_save": True}
HOST_ADAM = {f"{role}__optim__override_optimizer_config__optimizer_cpu_offload": True for role in ACTOR_AND_CRITIC}
HOST_ADAM |= {f"{role}__optim__override_optimizer_config__optimizer_offload_fraction": 0.5 for role in ACTOR_AND_CRITIC}
DDP = "actor_rollout_ref__actor__megatron__override_ddp_config__"
OVERLAPPED = {f"{DDP}overlap_grad_reduce": True, f"{DDP}overlap_param_gather": True, f"{DDP}bucket_size": 20_000}
DECAY = {"actor_rollout_ref__actor__optim__lr_decay_style": "linear", "trainer__total_training_steps": 30}


@pytest.mark.parametrize(
    ("save_model", "world_size", "tp_size", "pp_size", "keys"),
    [
        pytest.param(save_qwen2, 4, 2, 2, DECAY, marks=pytest.mark.exhaustive),
        (save_qwen3_moe, 2, 1, 1, EP2 | DECAY | BF16 | ASYNC),
        pytest.param(save_llama, 2, 1, 1, HOST_ADAM | OVERLAPPED, marks=pytest.mark.exhaustive),
        pytest.param(save_llama, 2, 1, 1, HOST_ADAM | ASYNC | BF16, marks=pytest.mark.exhaustive),
    ],
    ids=["TP2xPP2", "DP2xEP2-bf16-async", "DP2-host-Adam-overlapped", "DP2-host-Adam-bf16-async"],
)
def test_same_layout_is_bit_equal(save_model, world_size: int, tp_size: int, pp_size: int, keys, tmp_path) -> None:
    """Four steps with a save after the second; the last two once more, from there, in new processes.

    Would not catch what both runs lose alike.
    """
    config = run_config(save_model(tmp_path / "model"), tp_size, pp_size, **RATES, **keys)
    whole = run_ranks(world_size, train, config, 1, 4, None, tmp_path / "saved", 2)
    resumed = run_ranks(world_size, train, config, 3, 4, tmp_path / "saved")
    assert metrics_of(resumed) == metrics_of(whole)[2:]
    for ours, theirs in zip(resumed, whole, strict=True):
        for role in ("actor", "critic"):
            assert ours["state"][role].keys() == theirs["state"][role].keys()
            assert all(torch.equal(data, theirs["state"][role][name]) for name, data in ours["state"][role].items())


@pytest.mark.exhaustive
def test_other_layouts_go_on_alike(tmp_path) -> None:
    """TP2xPP2 for 2 steps, PP2xDP2 for 5, one process for 5, against TP2xPP2 for all 12: within 1e-5 throughout.

    Metrics of every step, weights and moments at the end. A Llama, because Adam makes full steps of rounding noise
    where a gradient is zero, as a key's bias has it. Would not catch a random state that was lost: nothing draws here.
    """
    path = save_llama(tmp_path / "model")
    first, second, third, whole = (tmp_path / name for name in ("first", "second", "third", "whole"))
    expected = metrics_of(run_ranks(4, train, run_config(path, 2, 2, **RATES), 1, 12, None, whole))
    parts = [
        *metrics_of(run_ranks(4, train, run_config(path, 2, 2, **RATES), 1, 2, None, first)),
        *metrics_of(run_ranks(4, train, run_config(path, 1, 2, **RATES), 3, 7, first, second)),
        *metrics_of(run_ranks(1, train, run_config(path, 1, 1, **RATES), 8, 12, second, third)),
    ]
    for number, (ours, theirs) in enumerate(zip(parts, expected, strict=True), start=1):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), number
    # The learning makes a difference that the comparison would see.
    assert abs(expected[0]["actor/entropy"] - expected[-1]["actor/entropy"]) > 1e-3
    for role in ("actor", "critic"):
        ours, theirs = saved(third / role), saved(whole / role)
        assert ours.keys() == theirs.keys()
        assert sum(name.startswith("optimizer.state.exp_avg_sq.") for name in ours) * 3 == len(ours)
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).abs().max() <= 1e-5 * max(1.0, float(tensor.abs().max())), name


VPP2 = {"actor_rollout_ref__actor__megatron__virtual_pipeline_model_parallel_size": 2}
CP2 = {"actor_rollout_ref__actor__megatron__context_parallel_size": 2}


def tied_experts(folder: Path) -> str:
    """Experts, and embeddings that the first and the last stage share."""
    return save_qwen3_moe(folder, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("save_model", "before", "after"),
    [
        (tied_experts, (4, 2, 2, MOE), (2, 1, 2, VPP2)),
        pytest.param(save_qwen2, (4, 1, 2, CP2), (2, 2, 1, {}), marks=pytest.mark.exhaustive),
        pytest.param(save_llama, (2, 1, 1, {}), (2, 1, 1, CP2), marks=pytest.mark.exhaustive),
        pytest.param(save_gpt_oss, (2, 2, 1, SP), (2, 1, 1, EP2), marks=pytest.mark.exhaustive),
        pytest.param(save_minimax, (2, 2, 1, SP), (2, 1, 2, {}), marks=WEEKLY),
    ],
    ids=[
        "tied experts: TP2xPP2xEP2 to PP2xVPP2",
        "PP2xCP2 to TP2",
        "DP2 to CP2",
        "stacks: TP2xETP2 to EP2",
        "joint norms: TP2 to PP2",
    ],
)
def test_experts_and_tied_heads_change_their_layout(save_model, before, after, tmp_path) -> None:
    """Two steps in one layout, two in another, against four in the first. Would not catch a wrong weight that no
    metric depends on.
    """
    path = save_model(tmp_path / "model")
    world_size, tp_size, pp_size, keys = before
    config = run_config(path, tp_size, pp_size, **RATES, **keys)
    expected = metrics_of(run_ranks(world_size, train, config, 1, 4, None, tmp_path / "saved", 2))
    world_size, tp_size, pp_size, keys = after
    config = run_config(path, tp_size, pp_size, **RATES, **keys)
    ours = metrics_of(run_ranks(world_size, train, config, 3, 4, tmp_path / "saved"))
    for step, metrics in enumerate(ours):
        assert metrics == pytest.approx(expected[2 + step], rel=1e-5, abs=1e-5)
    assert expected[1] != pytest.approx(expected[2], rel=1e-3)


def test_untouched_model_comes_out_of_a_checkpoint(tmp_path) -> None:
    """Saved before the first step by TP2xPP2xEP2, exported by one process: the bytes that went in, of actor and
    critic's trunk.

    Would not catch a mistake in what only training changes.
    """
    from megatron_rl.checkpoint.export_saved import export_saved

    path = tied_experts(tmp_path / "model")
    run_ranks(4, train, run_config(path, 2, 2, **MOE), 1, 0, None, tmp_path / "saved")
    original = load_file(f"{path}/model.safetensors")
    heads = {"lm_head.weight"} & original.keys()
    for role, differs in (("actor", set()), ("critic", heads | {"score.weight"})):
        shutil.copytree(path, tmp_path / "saved" / role / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
        export_saved(tmp_path / "saved", role, tmp_path / role)
        exported = load_file(tmp_path / role / "model.safetensors")
        assert exported.keys() ^ original.keys() == differs
        assert all(torch.equal(tensor, original[name]) for name, tensor in exported.items() if name not in differs)
    assert tuple(exported["score.weight"].shape) == (1, 128)


@pytest.mark.exhaustive
def test_stacks_come_out_of_a_checkpoint(tmp_path) -> None:
    """Saved by TP2xPP2 from a folder in 4 bits, exported by one process: what transformers' function unpacks, and no
    word of 4 bits. Would not catch a mistake in what only training changes.
    """
    from tiny_gpt_oss import unpack_by_transformers

    from megatron_rl.checkpoint.export_saved import export_saved
    from megatron_rl.checkpoint.hf_folder import was_quantised

    path = save_gpt_oss_in_4_bits(tmp_path / "model")
    run_ranks(4, train, run_config(path, 2, 2, **SP), 1, 0, None, tmp_path / "saved")
    plain = unpack_by_transformers(path, tmp_path / "plain", torch.float32)
    role = tmp_path / "saved" / "actor" / "huggingface"
    shutil.copytree(path, role, ignore=shutil.ignore_patterns("*.safetensors"))
    export_saved(tmp_path / "saved", "actor", tmp_path / "exported")
    exported, expected = (load_file(Path(folder, "model.safetensors")) for folder in (tmp_path / "exported", plain))
    assert exported.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, exported[name])] == []
    assert was_quantised(role) and not was_quantised(tmp_path / "exported")


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a saved role, weights and moments."""
    from megatron_rl.checkpoint.saved_tensors import SavedTensors

    tensors = SavedTensors(folder)
    return tensors.read(tensors.names)
