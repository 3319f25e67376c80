"""Updates of tasks (supervised, reward model, preferences): in every layout, and as a plain loop of transformers.

A supervised loss is the sum of the counted tokens' negative log-probs, divided by their number in the whole batch. A
loss of answers reads one or two numbers of each answer to a prompt, and all answers to a prompt are in one pass of one
data-parallel rank; it is a sum over prompts, divided by their number in the whole batch. These numbers are known before
the first pass, so a pass adds its own terms whatever others have; the rest is as in `updates.py`. A padded token and a
prompt's token weigh nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from layout_keys import of_actor
from plain_losses import BASELINE, WEIGHTS, cross_entropy, preferences, ranking, regression
from ranks import run_ranks
from scenarios import ALONE, Runs, Scenario
from task_cases import (
    NAMES,
    PlainLoop,
    answer_batch,
    assert_equals_plain,
    assert_same,
    one_update,
    task_config,
    token_batch,
)

from megatron_rl.config.tasks import DPO, REWARD, SFT

OF_ROUTERS = ("moe_aux_loss/mean", "expert_load/max")
ROLES = ("actor_rollout_ref__actor", "critic")


def in_roles(key: str, value: object) -> dict[str, object]:
    """The key of actor and critic."""
    return {f"{role}__{key}": value for role in ROLES}


@dataclass(frozen=True)
class Task:
    """What is learned, and from what."""

    kind: str
    """`sft`, `reward` or `dpo`."""
    loss: str = ""
    """Of answers; several are joined by `+`."""
    answers: tuple[int, ...] = ()
    """Of each prompt, how many."""

    def run(self, path: str, ranks: tuple[int, int, int], keys: Mapping[str, object]) -> list[dict]:
        """Run one update on every rank: four rows, or three prompts, to a micro-batch unless keys say otherwise."""
        num_ranks, tp_size, pp_size = ranks
        keys = {**in_roles("ppo_micro_batch_size_per_gpu", 4 if self.kind == SFT else 3), **self.keys(path), **keys}
        config = task_config(path, self.kind, tp_size, pp_size, **keys)
        if self.kind == SFT:
            return run_ranks(num_ranks, one_update, config, token_batch())
        batch, baseline = answer_batch(self.answers, self.kind == REWARD), (BASELINE,) if self.loss == "kto" else ()
        return run_ranks(num_ranks, one_update, config, batch, len(batch), *baseline)

    def keys(self, path: str) -> dict[str, object]:
        """Of the loss."""
        if self.kind == SFT:
            return {}
        if self.kind == REWARD:
            return {"critic__model__path": path, "reward_training__loss": self.loss}
        names = self.loss.split("+")
        return {"dpo__loss": names, "dpo__loss_weights": None if len(names) == 1 else list(WEIGHTS)}

    def alone(self, scenario: Scenario, runs: Runs) -> list[dict]:
        """The run of one process."""
        path = runs.path(scenario)
        which = (self, path, *sorted(scenario.common.items()))
        return runs.once(which, lambda: self.run(path, ALONE, scenario.common))


@dataclass(frozen=True)
class TaskUpdate:
    """Scores, metrics, gradient norm and new weights equal those of one process, within 1e-5.

    Would not catch an error that one process has, too, which `PlainStep` does.
    """

    task: Task
    is_balanced: bool = False
    """Whether routers have losses, which the role reports with the load of experts."""

    @property
    def name(self) -> str:
        return " ".join(("update of", self.task.kind, self.task.loss)).rstrip()

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        name, alone = NAMES[self.task.kind], self.task.alone(scenario, runs)
        keys = {**scenario.common, **scenario.keys, **of_actor(scenario.sizes)}
        found = self.task.run(runs.path(scenario), scenario.ranks, keys)
        assert_same(found, alone, name, runs.path(scenario))
        assert all((f"{name}/{metric}" in alone[0][name]) == self.is_balanced for metric in OF_ROUTERS)
        if self.is_balanced:
            plain = self.task.run(runs.path(scenario), ALONE, {})
            assert plain[0][name][f"{name}/grad_norm"] != alone[0][name][f"{name}/grad_norm"]


@dataclass(frozen=True)
class PlainStep:
    """Loss, gradient norm and new weights of one process equal those of a plain loop, within 1e-5.

    Would not catch a formula misread in both places, nor a mask that is wrong in the file's reader.
    """

    task: Task

    @property
    def name(self) -> str:
        return " ".join(("plain loop of", self.task.kind, self.task.loss)).rstrip()

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        task, path = self.task, runs.path(scenario)
        plain = PlainLoop(path, value_head=task.kind == REWARD)
        if task.kind == SFT:
            loss = cross_entropy(plain)
        elif task.kind == DPO:
            loss = preferences(plain, task.answers, task.loss.split("+"))
        else:
            loss = {"all_pairs": ranking, "regression": regression}[task.loss](plain, task.answers)
        assert_equals_plain(task.alone(scenario, runs), plain, plain.step(loss), NAMES[task.kind], path)
