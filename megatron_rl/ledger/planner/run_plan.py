"""What `megatron-rl plan` says about a valid configuration: groups, memory, time, transition; as data and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from megatron_rl.config.roles import ACTOR
from megatron_rl.config.schema import DataConfig, RunConfig
from megatron_rl.ledger.planner.ahead import AheadPlan, ahead_plan
from megatron_rl.ledger.planner.batch_arithmetic import batch_table, group_notes, repeat_notes
from megatron_rl.ledger.planner.file_rules import train_rows
from megatron_rl.ledger.planner.folder_files import lacking_files
from megatron_rl.ledger.planner.hardware import Hardware
from megatron_rl.ledger.planner.longest import LongestSequence, cutting_sequences, longest_sequence
from megatron_rl.ledger.planner.memory import StageMemory
from megatron_rl.ledger.planner.memory_report import Change, MemoryReport, advice, memory_report, recomputing_everything
from megatron_rl.ledger.planner.replay_rules import replay_notes
from megatron_rl.ledger.planner.run_models import PlannedModel, PoolModels, RunModels
from megatron_rl.ledger.planner.step_time import StepTime, generation, step_load, step_time
from megatron_rl.ledger.planner.transition import TransitionPlan
from megatron_rl.observe.summary import layout_table, plain_table

SHOWN_GROUPS = 4


def amount(num_bytes: float) -> str:
    """Bytes in GB, or below 0.1 GB in MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def mean_lengths(data: DataConfig, prompt: float | None, response: float | None) -> tuple[float, float]:
    """Tokens of prompt and answer that a plan assumes: as told, else half of the limit; no answer exceeds its own."""
    return (
        prompt or data.max_prompt_length / 2,
        min(response or data.max_response_length / 2, data.max_response_length),
    )


@dataclass(frozen=True)
class RunPlan:
    """The plan of one run. mean_lengths: prompt and answer, as assumed.

    changes: what would make it fit, one after the other. recomputing, cutting: what recomputed activations would do
    alone, and sequences cut over more ranks.
    train_rows: those of each training file, up to one batch. ahead: None where generation does not run ahead.
    """

    config: RunConfig
    models: RunModels
    memory: MemoryReport
    changes: list[Change]
    recomputing: Change | None
    cutting: Change | None
    transition: TransitionPlan
    time: StepTime
    num_tokens: float
    mean_lengths: tuple[float, float]
    lacking: list[str]
    train_rows: list[int]
    ahead: AheadPlan | None

    @classmethod
    def of(cls, config: RunConfig, hardware: Hardware, mean_lengths: tuple[float, float] | None = None) -> RunPlan:
        """For a configuration that has passed preflight. mean_lengths: None takes half of the longest of both."""
        if mean_lengths is None:
            mean_lengths = (config.data.max_prompt_length / 2, config.data.max_response_length / 2)
        models = RunModels(config)
        memory = memory_report(config, models, hardware)
        transition = TransitionPlan.of(models)
        load = step_load(config, memory, mean_lengths)
        time = step_time(models, hardware, load, transition)
        return cls(
            config,
            models,
            memory,
            [] if memory.fits else advice(config, models, hardware),
            None if memory.fits else recomputing_everything(config, models, hardware),
            None if memory.fits else cutting_sequences(config, models, hardware),
            transition,
            time,
            load.num_tokens,
            mean_lengths,
            lacking_files(config.actor_rollout_ref.model.path),
            train_rows(config.data),
            ahead_plan(config, models, generation(models, hardware), load, time),
        )

    @cached_property
    def longest(self) -> LongestSequence:
        """The longest prompt with its answer that this layout has room for."""
        return longest_sequence(self.config, self.models, self.memory)

    @property
    def seconds(self) -> dict[str, float]:
        """Phase -> seconds of one step."""
        return self.time.seconds

    @property
    def step_seconds(self) -> float:
        """One step: the phases of different pools overlap."""
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and answers, per rank of all pools."""
        return self.num_tokens / self.step_seconds / self.models.placement.world_size

    @property
    def is_several(self) -> bool:
        """Whether there is more than one pool."""
        return len(self.models.pools) > 1

    @property
    def groups(self) -> dict[str, list[list[int]]]:
        """Name -> ranks of each group, numbered within their pool, whose name comes first where there are several."""
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
            | {"changes": [{**c.settings, "peak_bytes": c.peak} for c in self.changes]}
            | {"longest_sequence": {"tokens": self.longest.tokens, "limited_by": self.longest.limited_by}},
            "transition": {
                "network_bytes_per_rank": list(transition.network),
                "link_bytes_per_rank": list(transition.link),
                "model_bytes": transition.model_bytes,
                "closed_form_bytes": transition.lower_bound,
                "sent_bytes_per_rank": None if transition.sent is None else list(transition.sent),
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
        } | ({} if self.ahead is None else {"ahead": self.ahead.as_json()})

    # As tables

    def tables(self) -> list[Table]:
        """Everything, in the order in which it is read."""
        return [
            layout_table(batch_table(self.config)),
            plain_table("Pools of ranks", POOL_HEADINGS, [pool_row(pool) for pool in self.models.pools.values()]),
            plain_table("Groups of ranks", ("group", "number", "ranks"), self._group_rows()),
            *map(self._memory_table, self.models.pools),
            plain_table("Largest moment", ("what", "held"), self._largest_moment()),
            layout_table(self._cache_rows(), "Room for generation"),
            layout_table(self._time_rows(), f"One step on {self.memory.hardware.name}, estimated"),
            *([] if self.ahead is None else [layout_table(self.ahead.rows(), "Running ahead, simulated")]),
            layout_table(transition_rows(self.transition), "Transition to rollout mode, per GPU"),
        ]

    def notes(self) -> list[str]:
        """Sentences to be read after the tables."""
        found = [f"{self.config.actor_rollout_ref.model.path} {rule} before the run can start" for rule in self.lacking]
        found += [*repeat_notes(self.config.data, self.train_rows), *group_notes(self.config)]
        actor = PlannedModel.read(self.config.actor_rollout_ref.model.path)
        found += replay_notes(self.config, actor.shape)
        found += [] if self.ahead is None else [self.ahead.advice]
        if not self.memory.fits:
            over = amount(self.memory.peak - self.memory.usable)
            where = f" of {self._worst_stage.pool}" if self.is_several else ""
            found.append(f"the plan does not fit: the worst rank{where} needs {over} more than {self._usable()}")
            found += [f"  change {change}: the worst rank then needs {amount(change.peak)}" for change in self.changes]
            alone = self.recomputing
            if alone is not None and alone.peak <= self.memory.usable:
                found.append(
                    f"  or recompute activations, with {alone}: that alone makes it {amount(alone.peak)}, and updates "
                    "take up to a third longer"
                )
            if self.cutting is not None:
                found.append(
                    f"  or cut sequences over more ranks, with {self.cutting}: that makes it "
                    f"{amount(self.cutting.peak)}"
                )
            if not self.changes or self.changes[-1].peak > self.memory.usable:
                found.append("  these are not enough: take more GPUs")
        return found

    @property
    def _worst_stage(self) -> StageMemory:
        return max(self.memory.stages, key=lambda stage: stage.peak)

    def _usable(self) -> str:
        return f"the {amount(self.memory.usable)} that tensors may have of a {self.memory.hardware.name}"

    def _memory_table(self, pool: str) -> Table:
        kinds = self.memory.kinds(pool)
        stages = list(kinds.values())
        rows = [(phase, *(amount(stage.total(phase)) for stage in stages)) for phase in stages[0].phases]
        where = f" of {pool}" if self.is_several else ""
        headings = ("phase", *(f"{kind} stage" for kind in kinds))
        return plain_table(f"Memory per GPU{where}, of {self._usable()}", headings, rows)

    def _group_rows(self) -> list[Sequence[str]]:
        rows: list[Sequence[str]] = []
        for name, groups in self.groups.items():
            shown = ", ".join(str(group) for group in groups[:SHOWN_GROUPS])
            rows.append((name, str(len(groups)), shown + (", ..." if len(groups) > SHOWN_GROUPS else "")))
        return rows

    def _largest_moment(self) -> list[Sequence[str]]:
        stage = self._worst_stage
        held = sorted(stage.phases[stage.worst_phase].items(), key=lambda item: -item[1])
        where = f" of {stage.pool}" if self.is_several else ""
        title = f"{stage.worst_phase} on the {stage.kind} stage{where}"
        return [(title, amount(stage.peak)), *((f"  {name}", amount(size)) for name, size in held if size)]

    def _cache_rows(self) -> list[tuple[str, object, str]]:
        memory = self.memory
        largest = memory.kv_cache.num_tokens(memory.room_kv_bytes)
        return [
            ("KV cache", amount(memory.kv_bytes), "rollout.kv_cache_memory_bytes, on each rank"),
            ("KV tokens", f"{memory.kv_tokens}", f"{memory.kv_cache.bytes_per_token} bytes a token and rank"),
            ("sequences at once", f"{memory.kv_sequences}", f"of {memory.longest} tokens, the longest"),
            (
                "largest KV cache",
                amount(memory.room_kv_bytes),
                f"that fits in every phase: {largest} tokens",
            ),
            ("longest sequence", f"{self.longest.tokens}", f"tokens, as far as {self.longest.limited_by} goes"),
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
    """(what, bytes, how they come about)."""

    def span(sizes: Sequence[int]) -> str:
        return f"{amount(min(sizes))} to {amount(max(sizes))}"

    if plan.sent is None:
        formula = "M / rollout TP - M / (TP x PP), M cut evenly"
        return [
            ("over the network", amount(plan.mean_network), f"mean; {span(plan.network)}"),
            ("inside its node", amount(plan.mean_link), f"mean; {span(plan.link)}"),
            ("closed form", amount(plan.lower_bound), f"{formula}, M = {amount(plan.model_bytes)}"),
        ]
    return [
        (
            "received by a rollout rank",
            amount(plan.mean_network),
            f"mean; {span(plan.network)}; over the network, as pools are taken to have machines of their own",
        ),
        ("sent by a training rank", amount(max(plan.sent)), "at most; replicas pass on what they have received"),
        ("sent by all", amount(sum(plan.sent)), "M, every byte of the model once"),
        ("closed form", amount(plan.lower_bound), "M / rollout TP, M cut evenly"),
    ]


SHOWN_SIZES = ("TP", "PP", "DP")
"""Sizes that are shown even where they are 1."""
POOL_HEADINGS = ("pool", "nodes x ranks", "roles", "layout", "ranks")


def pool_row(pool: PoolModels) -> tuple[str, ...]:
    """One pool: its size, roles and layouts. Ranks are numbered from 0 in every pool."""
    size, grid = pool.spec.size, pool.grid
    layouts = []
    if pool.spec.megatron_roles:
        cp_size = grid.most_sharing or grid.cp_size
        context = "CP" if grid.most_sharing is None else "CP<="
        sizes = {"TP": grid.tp_size, context: cp_size, "PP": grid.pp_size, "VPP": pool.vpp_size}
        sizes |= {"EP": grid.ep_size, "DP": grid.num_replicas // cp_size}
        layouts.append(" ".join(f"{name}{value}" for name, value in sizes.items() if value > 1 or name in SHOWN_SIZES))
    if pool.rollout is not None:
        layouts.append(f"rollout TP{pool.rollout.tp_size} x {pool.rollout.num_replicas}")
    return (
        pool.spec.name,
        f"{size.num_nodes} x {size.num_ranks_per_node}",
        ", ".join(role.name for role in pool.spec.roles),
        ", ".join(layouts),
        "0" if size.world_size == 1 else f"0-{size.world_size - 1}",
    )


def pool_as_json(pool: PoolModels) -> dict[str, Any]:
    """The same as data, with every group."""
    size, grid = pool.spec.size, pool.grid
    found: dict[str, Any] = {
        "nnodes": size.num_nodes,
        "n_gpus_per_node": size.num_ranks_per_node,
        "ranks": list(range(size.world_size)),
        "roles": [role.name for role in pool.spec.roles],
        "groups": pool_groups(pool),
    }
    if pool.spec.megatron_roles:
        cp_size = grid.most_sharing or grid.cp_size
        sizes = {"tp": grid.tp_size, "pp": grid.pp_size, "vpp": pool.vpp_size, "cp": cp_size}
        sizes |= {"dp": grid.num_replicas // cp_size}
        found |= sizes | {"ep": grid.ep_size, "etp": grid.expert_tp_size}
    if pool.rollout is not None:
        found |= {"rollout_tp": pool.rollout.tp_size, "rollout_replicas": pool.rollout.num_replicas}
    return found


def pool_groups(pool: PoolModels) -> dict[str, list[list[int]]]:
    """Name -> ranks of each group, of the grids that a pool uses."""
    grid, rollout, found = pool.grid, pool.rollout, {}
    if pool.spec.megatron_roles:
        dp_groups = grid.dp_groups() if grid.most_sharing is None else grid.cp_groups()
        found = {"training TP": grid.tp_groups(), "training PP": grid.pp_groups(), "training DP": dp_groups}
        if grid.most_sharing is not None:
            found |= {f"training CP{size}": grid.pack_groups(size) for size in grid.pack_sizes if size > 1}
        elif grid.cp_size > 1:
            found["training CP"] = grid.cp_groups()
    if rollout is not None:
        found["rollout TP"] = rollout.tp_groups()
    if rollout is not None and pool.spec.role(ACTOR) is not None:
        found["micro-DP"] = rollout.micro_dp_groups()
    return found
