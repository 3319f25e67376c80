"""What `megatron-rl plan` says about a valid configuration: groups, memory, time, transition; as data and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.schema import DataConfig, RunConfig
from megatron_rl.observe.summary import layout_table, plain_table
from megatron_rl.planner.batch_arithmetic import batch_table, repeat_notes
from megatron_rl.planner.file_rules import train_rows
from megatron_rl.planner.hardware import Hardware
from megatron_rl.planner.memory_report import Change, MemoryReport, advice, memory_report, recomputing_everything
from megatron_rl.planner.model_folder import lacking_files
from megatron_rl.planner.recompute import Recompute
from megatron_rl.planner.run_models import PlannedModel, RunModels
from megatron_rl.planner.time import Estimator, Layout, Load, ModelCost
from megatron_rl.planner.transition import TransitionPlan

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
    """The plan of one run. seconds: phase -> time of one step. mean_lengths: prompt and answer, as assumed.

    changes: what would make it fit, one after the other. recomputing: what recomputed activations would do alone.
    train_rows: those of each training file, up to one batch.
    """

    config: RunConfig
    models: RunModels
    memory: MemoryReport
    changes: list[Change]
    recomputing: Change | None
    transition: TransitionPlan
    seconds: dict[str, float]
    num_tokens: float
    mean_lengths: tuple[float, float]
    lacking: list[str]
    train_rows: list[int]

    @classmethod
    def of(cls, config: RunConfig, hardware: Hardware, mean_lengths: tuple[float, float] | None = None) -> RunPlan:
        """For a configuration that has passed preflight. mean_lengths: None takes half of the longest of both."""
        if mean_lengths is None:
            mean_lengths = (config.data.max_prompt_length / 2, config.data.max_response_length / 2)
        models = RunModels(config)
        memory = memory_report(config, models, hardware)
        transition = TransitionPlan.of(models)
        load = step_load(config, memory, mean_lengths)
        return cls(
            config,
            models,
            memory,
            [] if memory.fits else advice(config, models, hardware),
            None if memory.fits else recomputing_everything(config, models, hardware),
            transition,
            step_seconds(config, models, hardware, load) | {"reshard": transition.seconds(hardware)},
            load.num_tokens,
            mean_lengths,
            lacking_files(config.actor_rollout_ref.model.path),
            train_rows(config.data),
        )

    @property
    def step_seconds(self) -> float:
        """One step, its phases one after the other."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and answers, per rank."""
        return self.num_tokens / self.step_seconds / self.models.grid.world_size

    @property
    def groups(self) -> dict[str, list[list[int]]]:
        """Name -> ranks of each group."""
        grid, rollout = self.models.grid, self.models.rollout
        return {
            "training TP": grid.tp_groups(),
            "training PP": grid.pp_groups(),
            "training DP": grid.dp_groups(),
            "rollout TP": rollout.tp_groups(),
            "micro-DP": rollout.micro_dp_groups(),
        }

    def as_json(self) -> dict[str, Any]:
        """Bytes, seconds and ranks."""
        transition = self.transition
        return {
            "batch": {name: value for name, value, _ in batch_table(self.config)},
            "groups": self.groups,
            "memory": self.memory.as_json() | {"changes": [{**c.settings, "peak_bytes": c.peak} for c in self.changes]},
            "transition": {
                "network_bytes_per_rank": list(transition.network),
                "link_bytes_per_rank": list(transition.link),
                "model_bytes": transition.model_bytes,
                "closed_form_bytes": transition.lower_bound,
            },
            "time": {
                "seconds": self.seconds,
                "step_seconds": self.step_seconds,
                "tokens_per_second_per_rank": self.tokens_per_second,
                "mean_prompt_length": self.mean_lengths[0],
                "mean_response_length": self.mean_lengths[1],
            },
            "lacking_files": self.lacking,
        }

    # As tables

    def tables(self) -> list[Table]:
        """Everything, in the order in which it is read."""
        return [
            layout_table(batch_table(self.config)),
            plain_table("Groups of ranks", ("group", "number", "ranks"), self._group_rows()),
            plain_table(
                self._memory_title(), ("phase", *(f"{kind} stage" for kind in self.memory.kinds)), self._memory()
            ),
            plain_table("Largest moment", ("what", "held"), self._largest_moment()),
            layout_table(self._cache_rows(), "Room for generation"),
            layout_table(self._time_rows(), f"One step on {self.memory.hardware.name}, estimated"),
            layout_table(self._transition_rows(), "Transition to rollout mode, per GPU"),
        ]

    def notes(self) -> list[str]:
        """Sentences to be read after the tables."""
        found = [f"{self.config.actor_rollout_ref.model.path} {rule} before the run can start" for rule in self.lacking]
        found += repeat_notes(self.config.data, self.train_rows)
        if not self.memory.fits:
            over = amount(self.memory.peak - self.memory.usable)
            found.append(f"the plan does not fit: the worst rank needs {over} more than {self._usable()}")
            found += [f"  change {change}: the worst rank then needs {amount(change.peak)}" for change in self.changes]
            alone = self.recomputing
            if alone is not None and alone.peak <= self.memory.usable:
                found.append(
                    f"  or recompute activations, with {alone}: that alone makes it {amount(alone.peak)}, and updates "
                    "take up to a third longer"
                )
            if not self.changes or self.changes[-1].peak > self.memory.usable:
                found.append("  these are not enough: take more GPUs")
        return found

    def _usable(self) -> str:
        return f"the {amount(self.memory.usable)} that tensors may have of a {self.memory.hardware.name}"

    def _memory_title(self) -> str:
        return f"Memory per GPU, of {self._usable()}"

    def _group_rows(self) -> list[Sequence[str]]:
        rows = []
        for name, groups in self.groups.items():
            shown = ", ".join(str(group) for group in groups[:SHOWN_GROUPS])
            rows.append((name, str(len(groups)), shown + (", ..." if len(groups) > SHOWN_GROUPS else "")))
        return rows

    def _kinds(self) -> list[str]:
        return [f"{kind} stage" for kind in self.memory.kinds]

    def _memory(self) -> list[Sequence[str]]:
        stages = list(self.memory.kinds.values())
        phases = stages[0].phases
        return [(phase, *(amount(stage.total(phase)) for stage in stages)) for phase in phases]

    def _largest_moment(self) -> list[Sequence[str]]:
        stage = max(self.memory.stages, key=lambda stage: stage.peak)
        held = sorted(stage.phases[stage.worst_phase].items(), key=lambda item: -item[1])
        title = f"{stage.worst_phase} on the {stage.kind} stage"
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
        ]

    def _time_rows(self) -> list[tuple[str, object, str]]:
        prompt, response = self.mean_lengths
        rows: list[tuple[str, object, str]] = [
            (phase, f"{seconds:.2f} s", f"{seconds / self.step_seconds:.0%}") for phase, seconds in self.seconds.items()
        ]
        note = f"{self.tokens_per_second:.0f} tokens/s per rank, at {prompt:g} + {response:g} tokens a sample"
        return [*rows, ("step", f"{self.step_seconds:.2f} s", note)]

    def _transition_rows(self) -> list[tuple[str, object, str]]:
        plan = self.transition

        def span(sizes: Sequence[int]) -> str:
            return f"{amount(min(sizes))} to {amount(max(sizes))}"

        formula = "M / rollout TP - M / (TP x PP), M cut evenly"
        return [
            ("over the network", amount(plan.mean_network), f"mean; {span(plan.network)}"),
            ("inside its node", amount(plan.mean_link), f"mean; {span(plan.link)}"),
            ("closed form", amount(plan.lower_bound), f"{formula}, M = {amount(plan.model_bytes)}"),
        ]


def step_load(config: RunConfig, memory: MemoryReport, mean_lengths: tuple[float, float]) -> Load:
    """What one step of the actor asks for."""
    shared, data = config.actor_rollout_ref, config.data
    actor, rollout = shared.actor, shared.rollout
    prompt, response = mean_lengths
    length = prompt + response
    block = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu * length
    fitting = int(memory.kv_tokens / (prompt + response / 2))
    return Load(
        num_samples=data.train_batch_size * rollout.n,
        prompt=prompt,
        response=response,
        max_response=data.max_response_length,
        mini_batch=min(actor.ppo_mini_batch_size, data.train_batch_size) * rollout.n,
        block_tokens=int(block),
        epochs=actor.ppo_epochs,
        max_seqs=max(1, min(rollout.max_num_seqs, fitting)),
    )


def step_seconds(config: RunConfig, models: RunModels, hardware: Hardware, load: Load) -> dict[str, float]:
    """Phase -> seconds, of the phases that this run has."""
    grid = models.grid
    layout = Layout(
        grid.world_size,
        config.trainer.n_gpus_per_node,
        grid.tp_size,
        grid.pp_size,
        models.vpp_size,
        grid.ep_size,
        models.rollout.tp_size,
    )
    dtype = config.actor_rollout_ref.actor.megatron.dtype
    actor = Estimator(ModelCost.of(models.actor), layout, hardware, dtype)
    found = {"generation": actor.generate(load), "old_log_prob": actor.forward(load)}
    if models.has_reference:
        found["ref"] = actor.forward(load)
    if models.reward is not None:
        found["rm_scores"] = Estimator(ModelCost.of(models.reward), layout, hardware, dtype).forward(load)
    if models.critic is not None:
        critic = Estimator(ModelCost.of(models.critic), layout, hardware, dtype)
        again = recomputed_share(models, models.critic, config.critic.megatron)
        found |= {"values": critic.forward(load), "update_critic": critic.train(replace(load, recompute=again))}
    again = recomputed_share(models, models.actor, config.actor_rollout_ref.actor.megatron)
    return found | {"update_actor": actor.train(replace(load, recompute=again))}


def recomputed_share(models: RunModels, model: PlannedModel, megatron: MegatronConfig) -> float:
    """Share of a trained model's layers that run their forward pass twice."""
    stages = models.stages(model)
    sizes = [len(chunk) for pp_rank in range(stages.pp_size) for chunk in stages.layers(pp_rank)]
    return Recompute.of(megatron).share(sizes)
