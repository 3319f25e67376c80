"""The plan of a PPO run that `megatron-rl plan` prints: groups, memory, time and resharding, as data and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from megatron_rl.config.schema import DataConfig, RunConfig
from megatron_rl.observe.summary import layout_table, plain_table
from megatron_rl.planning.async_estimate import AsyncEstimate, ahead_plan
from megatron_rl.planning.batch_arithmetic import batch_table, group_notes, repeat_notes
from megatron_rl.planning.delta_notes import delta_notes
from megatron_rl.planning.file_rules import train_rows
from megatron_rl.planning.fitting_changes import FittingChanges, changes_as_json, misfit_notes
from megatron_rl.planning.folder_files import end_token_notes, lacking_files
from megatron_rl.planning.follower_transfers import follower_transfers
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.lora_rules import lora_notes
from megatron_rl.planning.memory_report import (
    GenerationMemory,
    LongestSequence,
    longest_sequence,
    memory_report,
)
from megatron_rl.planning.plan_tables import (
    amount,
    groups_table,
    memory_table,
    pool_as_json,
    pool_groups,
    pools_table,
)
from megatron_rl.planning.repair_notes import elastic_notes, repair_notes
from megatron_rl.planning.replay_rules import replay_notes
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.step_time import StepTime, generation, step_load, step_time
from megatron_rl.planning.transition import TransitionPlan


def mean_lengths(data: DataConfig, prompt: float | None, response: float | None) -> tuple[float, float]:
    """Return mean tokens of prompt and response to plan with: as given, else half of the limit.

    A response does not exceed `data.max_response_length`.
    """
    return (
        prompt or data.max_prompt_length / 2,
        min(response or data.max_response_length / 2, data.max_response_length),
    )


@dataclass(frozen=True)
class RunPlan:
    """The plan of one run.

    fitting: what would make it fit; None where it does. num_tokens: of one step. mean_lengths: assumed tokens of prompt
    and response. lacking: what the actor's model folder still needs. train_rows: rows of each training file, up to one
    batch. ahead: None where generation does not run ahead of training.
    """

    config: RunConfig
    models: RunModels
    memory: GenerationMemory
    fitting: FittingChanges | None
    transition: TransitionPlan
    time: StepTime
    num_tokens: float
    mean_lengths: tuple[float, float]
    lacking: list[str]
    train_rows: list[int]
    ahead: AsyncEstimate | None

    @classmethod
    def of(cls, config: RunConfig, hardware: Hardware, mean_lengths: tuple[float, float] | None = None) -> RunPlan:
        """Plan a configuration that has passed preflight. mean_lengths: of prompt and response; None: half of the
        limits.
        """
        lengths = mean_lengths or (config.data.max_prompt_length / 2, config.data.max_response_length / 2)
        models = RunModels(config)
        memory = memory_report(config, models, hardware)
        transition = TransitionPlan.of(models)
        load = step_load(config, memory.tokens_of(lengths), lengths)
        time = step_time(models, hardware, load, transition)
        return cls(
            config,
            models,
            memory,
            None if memory.fits else FittingChanges.of(config, models, hardware),
            transition,
            time,
            load.num_tokens,
            lengths,
            lacking_files(config.actor_rollout_ref.model.path),
            train_rows(config.data),
            ahead_plan(config, models, generation(models, hardware), load, time),
        )

    @cached_property
    def longest(self) -> LongestSequence:
        """The longest sequence that this layout has room for."""
        return longest_sequence(self.config, self.models, self.memory)

    @property
    def seconds(self) -> dict[str, float]:
        """Phase -> seconds in one step."""
        return self.time.seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of one step, in which the phases of different pools overlap."""
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and responses per second, per rank of all pools."""
        return self.num_tokens / self.step_seconds / self.models.placement.world_size

    @property
    def is_several(self) -> bool:
        """Whether there is more than one pool."""
        return len(self.models.pools) > 1

    @property
    def groups(self) -> dict[str, list[list[int]]]:
        """Name -> ranks of each group, numbered within their pool. With several pools the name begins with the
        pool's.
        """
        return {
            f"{pool} {name}" if self.is_several else name: groups
            for pool, models in self.models.pools.items()
            for name, groups in pool_groups(models).items()
        }

    def as_json(self) -> dict[str, Any]:
        """Bytes, seconds and ranks."""
        transition = self.transition
        return {
            "batch": {name: value for name, value, _ in batch_table(self.config)},
            "pools": {name: pool_as_json(pool) for name, pool in self.models.pools.items()},
            "groups": self.groups,
            "memory": self.memory.as_json()
            | {"changes": changes_as_json(self.fitting)}
            | {"longest_sequence": {"tokens": self.longest.tokens, "limited_by": self.longest.limited_by}},
            "transition": {
                "network_bytes_per_rank": list(transition.network),
                "link_bytes_per_rank": list(transition.link),
                "model_bytes": transition.model_bytes,
                "closed_form_bytes": transition.lower_bound,
                "sent_bytes_per_rank": None if transition.sent is None else list(transition.sent),
                "once_bytes_per_rank": None if transition.once is None else transition.once.received,
            },
            "time": {
                "seconds": self.seconds,
                "pools": {phase: list(pools) for phase, pools in self.time.pools.items()},
                "critical_path": self.time.critical_path,
                "step_seconds": self.step_seconds,
                "tokens_per_second_per_rank": self.tokens_per_second,
                "mean_prompt_length": self.mean_lengths[0],
                "mean_response_length": self.mean_lengths[1],
            },
            "lacking_files": self.lacking,
        } | self._further()

    def _further(self) -> dict[str, Any]:
        """Return the parts that only some runs have."""
        ahead = {} if self.ahead is None else {"ahead": self.ahead.as_json()}
        followers = [transfer.as_json() for transfer in follower_transfers(self.models)]
        return ahead | ({"followers": followers} if followers else {})

    # As tables

    def tables(self) -> list[Table]:
        """All tables, in the order of printing; of an evaluation none of a step."""
        title = f"One step on {self.memory.hardware.name}, estimated"
        return [
            layout_table(batch_table(self.config)),
            pools_table(self.models.pools.values()),
            groups_table(self.groups.items()),
            *(memory_table(self.memory, pool, self._of_pool(pool)) for pool in self.models.pools),
            plain_table("Largest moment", ("what", "held"), self._largest_moment()),
            layout_table(self._cache_rows(), "Room for generation"),
            *([] if self.config.trainer.val_only else [layout_table(self._time_rows(), title)]),
            *([] if self.ahead is None else [layout_table(self.ahead.rows(), "Asynchronous training, simulated")]),
            layout_table(transition_rows(self.transition), "Transition to rollout mode, per GPU"),
        ]

    def notes(self) -> list[str]:
        """Sentences to print after the tables."""
        path = self.config.actor_rollout_ref.model.path
        notes = [f"{path} {rule} before the run can start" for rule in self.lacking]
        notes += [*repeat_notes(self.config.data, self.train_rows), *group_notes(self.config)]
        notes += end_token_notes(path) + lora_notes(self.config)
        notes += repair_notes(self.config, self.models.pools) + elastic_notes(self.config)
        notes += delta_notes(self.models)
        notes += replay_notes(self.config, self.models.actor.shape)
        notes += [] if self.ahead is None else [self.ahead.advice]
        turns = self.config.actor_rollout_ref.rollout.multi_turn
        if self.config.has_turns and not turns.planned_wait_s:
            notes.append("seconds that environments and tools take are not in the plan: set multi_turn.planned_wait_s")
        if self.fitting is not None:
            where = self._of_pool(self.memory.worst.pool)
            notes += misfit_notes(self.memory, where, self.fitting)
        return notes

    def _of_pool(self, pool: str) -> str:
        """Name a pool where there are several."""
        return f" of {pool}" if self.is_several else ""

    def _largest_moment(self) -> list[Sequence[str]]:
        stage = self.memory.worst
        held = sorted(stage.phases[stage.worst_phase].items(), key=lambda item: -item[1])
        title = f"{stage.worst_phase} on the {stage.kind} stage{self._of_pool(stage.pool)}"
        return [(title, amount(stage.peak)), *((f"  {name}", amount(size)) for name, size in held if size)]

    def _cache_rows(self) -> list[tuple[str, object, str]]:
        memory = self.memory
        largest = memory.kv_cache.num_tokens(memory.room_kv_bytes)
        return [
            ("KV cache", amount(memory.kv_bytes), "rollout.kv_cache_memory_bytes, on each rank"),
            ("KV tokens", f"{memory.kv_tokens}", f"{memory.kv_cache.bytes_per_token} bytes a token and rank"),
            ("sequences at once", f"{memory.kv_sequences}", f"with {memory.longest} tokens each, the longest"),
            (
                "largest KV cache",
                amount(memory.room_kv_bytes),
                f"that fits in every phase: {largest} tokens",
            ),
            ("longest sequence", f"{self.longest.tokens}", f"tokens, as limited by {self.longest.limited_by}"),
        ]

    def _time_rows(self) -> list[tuple[str, object, str]]:
        prompt, response = self.mean_lengths
        path, rows = self.time.critical_path, []
        for phase, seconds in self.seconds.items():
            note = f"{seconds / self.step_seconds:.0%}"
            if self.is_several:
                note = f"{note if phase in path else 'beside others'}, on {' and '.join(self.time.pools[phase])}"
            rows.append((phase, f"{seconds:.2f} s", note))
        if self.is_several:
            rows.append(("critical path", f"{self.step_seconds:.2f} s", " + ".join(path)))
        note = f"{self.tokens_per_second:.0f} tokens/s per rank, at {prompt:g} + {response:g} tokens a sample"
        return [*rows, ("step", f"{self.step_seconds:.2f} s", note)]


def transition_rows(plan: TransitionPlan) -> list[tuple[str, object, str]]:
    """Return rows (what, bytes, how they come about)."""

    def span(sizes: Sequence[int]) -> str:
        return f"{amount(min(sizes))} to {amount(max(sizes))}"

    once = []
    if plan.once is not None:
        sizes = plan.once.received
        note = f"mean; {span(sizes)}; the base, before the first step; the rest is of adapters, and of every step"
        once = [("once in a run", amount(statistics.fmean(sizes)), note)]
    if plan.sent is None:
        formula = "M / rollout TP - M / (TP x PP), M cut evenly"
        return [
            *once,
            ("over the network", amount(plan.mean_network), f"mean; {span(plan.network)}"),
            ("inside its node", amount(plan.mean_link), f"mean; {span(plan.link)}"),
            ("closed form", amount(plan.lower_bound), f"{formula}, M = {amount(plan.model_bytes)}"),
        ]
    return [
        *once,
        (
            "received by a rollout rank",
            amount(plan.mean_network),
            f"mean; {span(plan.network)}; over the network, as pools are taken to have machines of their own",
        ),
        ("sent by a training rank", amount(max(plan.sent)), "at most; replicas pass received weights on"),
        ("sent by all", amount(sum(plan.sent)), "M, every byte of the model once"),
        ("closed form", amount(plan.lower_bound), "M / rollout TP, M cut evenly"),
    ]
