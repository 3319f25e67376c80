"""Train roles for some steps, from a checkpoint and to others, as the controller does it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from task_cases import NAMES, answer_batch, token_batch
from tiny_models import random_batch

from megatron_rl.checkpoint.saved_tensors import SavedTensors
from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE
from megatron_rl.config.tasks import DPO, PPO, REWARD, SFT

NUM_ROWS, NUM_PROMPTS = 8, 5
ANSWERS = {REWARD: (3, 2, 4, 2, 2, 2, 3), DPO: (2,) * 7}
RATES = {"actor_rollout_ref__actor__optim__lr": 1e-3, "critic__optim__lr": 1e-3}


def train(config, first: int, last: int, targets: Mapping[int, Path], source: Path | None = None) -> dict:
    """Load `source`, take steps first to last, save after those in `targets`: what one rank then knows.

    The next steps run beside a save. Step 0 is before all others.
    """
    from megatron_rl.roles.host import RankHost

    worker, task = RankHost(config), config.trainer.stage
    for name in ("actor", "critic") if task == PPO else (NAMES[task],):
        worker.build(name)
    where, metrics, save = worker.coordinates(), [], None
    if source is not None:
        states = pickle.loads((source / "states.pickle").read_bytes())
        for name, role in worker.trained.items():
            role.checkpoint.load(source / name, states[name])
    for step in range(first - 1, last + 1):
        if step >= first:
            metrics.append((take_step if task == PPO else take_step_of_task)(worker, where, step))
        if step in targets and (step >= first or source is None):
            assert save is None or save.finish(wait=True)
            save = start_saving(worker, targets[step])
    assert save is None or save.finish(wait=True)
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


def take_step_of_task(worker, where, step: int) -> dict[str, float]:
    """Update a task's role with other rows in every step: its metrics."""
    task = worker.config.trainer.stage
    batch = token_batch() if task == SFT else answer_batch(ANSWERS[task], score_token=task == REWARD)
    rows = torch.randperm(len(batch), generator=torch.Generator().manual_seed(step))[:NUM_PROMPTS]
    mine = batch[rows][torch.arange(NUM_PROMPTS).tensor_split(where.dp_size)[where.dp_rank]]
    role = worker.roles[NAMES[task]]
    return (role.update_preferences if task == DPO else role.update)(mine, *(() if task == SFT else (NUM_PROMPTS,)))


def start_saving(worker, target: Path):
    """As the controller does it, with the folders and the numbers."""
    from megatron_rl.roles.saving import begin_save

    for name in worker.trained:
        (target / name).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    where = worker.spec.name, worker.groups, None, worker.device
    save = begin_save(target, worker.trained, *where, worker.references)
    if worker.groups.rank == 0 and worker.trained:
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


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a saved role, weights and moments."""
    tensors = SavedTensors(folder)
    return tensors.read(tensors.names)
