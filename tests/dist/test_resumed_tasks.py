"""A task's role that was saved in one layout goes on in others as the uninterrupted run: metrics, weights, moments."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from task_cases import NAMES, answer_batch, token_batch
from test_resumed_roles import RATES, metrics_of, saved, start_saving
from tiny_models import run_config, save_llama, save_reward_model

from megatron_rl.config.task_config import for_task
from megatron_rl.config.tasks import DPO, REWARD, SFT

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(300)]

SIZES = {REWARD: (3, 2, 4, 2, 2, 2, 3), DPO: (2,) * 7}
NUM_PROMPTS = 5


def batch_of(task: str, step: int):
    """Other rows in every step."""
    batch = token_batch() if task == SFT else answer_batch(SIZES[task], score_token=task == REWARD)
    drawn = torch.randperm(len(batch), generator=torch.Generator().manual_seed(step))
    return batch[drawn[:NUM_PROMPTS]]


def train(config, first: int, last: int, targets: dict[int, Path], source: Path | None = None) -> dict:
    """Load `source`, take steps first to last, save after those in `targets`: the metrics of one rank."""
    from megatron_rl.roles.host import RankHost

    task, worker = config.trainer.stage, RankHost(config)
    name = NAMES[task]
    worker.build(name)
    role, where, metrics = worker.roles[name], worker.coordinates(), []
    if source is not None:
        role.checkpoint.load(source / name, pickle.loads((source / "states.pickle").read_bytes())[name])
    for step in range(first, last + 1):
        rows = torch.arange(NUM_PROMPTS).tensor_split(where.dp_size)[where.dp_rank]
        mine = batch_of(task, step)[rows]
        told = () if task == SFT else (NUM_PROMPTS,)
        metrics.append((role.update_preferences if task == DPO else role.update)(mine, *told))
        if step in targets:
            assert start_saving(worker, targets[step]).finish(wait=True)
    return {"metrics": metrics if where.dp_collector else None}


@pytest.mark.parametrize("task", [SFT, REWARD, DPO])
def test_other_layouts_go_on_alike(task: str, tmp_path: Path) -> None:
    """TP2xPP2 for two steps, then one process, and DP2, for two more, against TP2xPP2 for all four: within 1e-5.

    A Llama, because Adam makes full steps of rounding noise where a gradient is zero, as a key's bias has it. Would not
    catch what a task keeps beside its role, which tests/e2e/test_stage_runs.py and test_stage_ends.py resume.
    """
    path = save_reward_model(tmp_path, "Llama") if task == REWARD else save_llama(tmp_path / "model")

    def run(ranks: int, tp_size: int, pp_size: int, first: int, targets: dict[int, Path], source: Path | None = None):
        keys = RATES | {"critic__model__path": path, "trainer__n_gpus_per_node": ranks}
        config = for_task(run_config(path, tp_size, pp_size, **keys), task)
        return metrics_of(run_ranks(ranks, train, config, first, 4, targets, source))

    half, whole = tmp_path / "half", tmp_path / "whole"
    expected = run(4, 2, 2, 1, {2: half, 4: whole})
    name = NAMES[task]
    theirs = saved(whole / name)
    for ranks in (1, 2):
        target = tmp_path / str(ranks)
        for ours, other in zip(run(ranks, 1, 1, 3, {4: target}, half), expected[2:], strict=True):
            assert ours == pytest.approx(other, rel=1e-5, abs=1e-5)
        ours = saved(target / name)
        assert ours.keys() == theirs.keys()
        assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in ours) * 3 == len(ours)
        for key, tensor in theirs.items():
            assert (ours[key] - tensor).abs().max() <= 1e-5 * max(1.0, float(tensor.abs().max())), key
    # The learning makes a difference that the comparison would see.
    assert abs(expected[2][f"{name}/grad_norm"] / expected[3][f"{name}/grad_norm"] - 1) > 1e-3
