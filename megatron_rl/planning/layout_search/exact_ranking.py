"""Placements that `map` offers, checked and counted like a run: preflight, memory plan, step time.

The search counts roles and their passes exactly, but the resharding by closed forms and no message in flight. Here the
configuration is built, every rule is checked, the whole memory of the sampled stages is counted, and the step is timed
with the bytes of the exchange plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.planning.async_estimate import ahead_plan
from megatron_rl.planning.layout_search.partitions import PoolNames
from megatron_rl.planning.layout_search.pools import PoolChoice
from megatron_rl.planning.layout_search.role_on_layout import sampled_stages
from megatron_rl.planning.layout_search.search import Placed
from megatron_rl.planning.layout_search.search_problem import SearchProblem
from megatron_rl.planning.layout_search.settings import configured, settings_of_placement
from megatron_rl.planning.memory import MemoryOfStage, StageMemory
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.run_models import NUM_SCRATCH, RunModels, bucket_bytes
from megatron_rl.planning.step_time import StepTime, generation, step_load, step_time
from megatron_rl.planning.transition import TransitionPlan


class BoundedModels(RunModels):
    """A run whose resharding messages are assumed to have the largest size, so that no schedule is computed."""

    def scratch_bytes(self, pp_rank: int, *, first: bool = False) -> int:
        """Return the bytes of the most messages in flight."""
        return NUM_SCRATCH * max(1, bucket_bytes(self.config) // self.element // NUM_SCRATCH) * self.element


@dataclass(frozen=True)
class Candidate:
    """A placement that passes preflight and fits. seconds: of a step, with running ahead.

    settings: dotted key -> value. memory: pool -> the stage with the highest peak. estimate: seconds by closed forms.
    """

    placed: Placed
    config: RunConfig
    settings: dict[str, Any]
    time: StepTime
    seconds: float
    memory: dict[str, StageMemory]
    estimate: float

    @property
    def is_ahead(self) -> bool:
        return self.placed.ahead > 0


class Finalists:
    """Counts placements exactly. Equal pools and reshardings are counted once.

    refused, too_large: placements that preflight refuses, or that do not fit.
    """

    def __init__(self, work: SearchProblem, names: PoolNames) -> None:
        self.work, self.names = work, names
        self.refused: list[tuple[Placed, list[Violation]]] = []
        self.too_large: list[tuple[Placed, dict[str, StageMemory]]] = []
        self._stages: dict[tuple[int, int], StageMemory] = {}
        self._transitions: dict[tuple[Any, ...], TransitionPlan] = {}
        self._first: RunModels | None = None

    def best(self, placements: Sequence[Placed], number: int) -> list[Candidate]:
        """Return the `number` fastest candidates. placements: in the order of their estimates."""
        best: list[Candidate] = []
        for placed in placements:
            # A placement whose estimate is above the winner's exact time does not turn out faster than the winner.
            if len(best) >= number and placed.seconds > best[0].seconds:
                break
            candidate = self.candidate(placed)
            if candidate is not None:
                best = sorted([*best, candidate], key=lambda each: (each.seconds, len(each.placed.choices)))
        return best[:number]

    def candidate(self, placed: Placed) -> Candidate | None:
        """Count one placement; None if preflight refuses it or it does not fit."""
        settings = settings_of_placement(self.work, self.names, placed)
        config = configured(self.work.config, settings)
        violations = preflight(config, config_only=True)
        if violations:
            self.refused.append((placed, violations))
            return None
        models = self._models(config)
        memory = {self.names.name(choice.block): self._worst(models, choice, placed) for choice in placed.choices}
        if max(stage.peak for stage in memory.values()) > self.work.usable:
            self.too_large.append((placed, memory))
            return None
        drawing = next(choice.generation for choice in placed.choices if choice.generation is not None)
        mean = self.work.load.prompt + self.work.load.response / 2
        load = step_load(config, self.work.cache(drawing.tp).num_tokens(drawing.kv_bytes, mean), self.work.lengths)
        time = step_time(models, self.work.hardware, load, self._transition(models, placed))
        seconds = time.total
        if placed.ahead:
            ahead = ahead_plan(config, models, generation(models, self.work.hardware), load, time)
            seconds = ahead.ahead_s if ahead is not None else seconds
        return Candidate(placed, config, settings, time, seconds, memory, placed.seconds)

    def _key(self, placed: Placed) -> tuple[Any, ...]:
        """Return what decides a resharding."""
        drawer = next(choice for choice in placed.choices if choice.generation is not None)
        trainer = placed.choices[0]
        assert drawer.generation is not None  # it was looked for
        return (trainer.grid, trainer.shape, drawer is trainer, drawer.shape, drawer.generation.tp)

    def _models(self, config: RunConfig) -> RunModels:
        models = BoundedModels(config, variant_of=self._first)
        self._first = self._first or models
        return models

    def _transition(self, models: RunModels, placed: Placed) -> TransitionPlan:
        key = self._key(placed)
        if key not in self._transitions:
            self._transitions[key] = TransitionPlan.of(models)
        return self._transitions[key]

    def _worst(self, models: RunModels, choice: PoolChoice, placed: Placed) -> StageMemory:
        key = (id(choice), placed.ahead)  # choices live as long as the placements
        if key not in self._stages:
            name = self.names.name(choice.block)
            ranks = sampled_stages(models.pools[name].grid.pp_size)
            stages = [MemoryOfStage(models, name, pp_rank).planned() for pp_rank in ranks]
            self._stages[key] = max(stages, key=lambda stage: stage.peak)
        return self._stages[key]
