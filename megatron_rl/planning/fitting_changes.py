"""What makes a plan fit that does not: changes that are enough alone, else the fewest that are enough together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.memory import plan_pools
from megatron_rl.planning.memory_advice import (
    Change,
    Tried,
    advice,
    cutting_sequences,
    excess,
    other_layouts,
    recomputing_everything,
    tried,
)
from megatron_rl.planning.memory_report import MemoryReport, amount, usable_bytes
from megatron_rl.planning.run_models import RunModels

RECOMPUTE_COST = ", and updates take up to a third longer"


@dataclass(frozen=True)
class FittingChanges:
    """Changes of a plan that does not fit. alone: each is enough by itself, the cheapest first.

    together: changes of which none can be left out; they are enough, or come as near as changes can. costs: text of a
    change -> what it costs besides.
    """

    alone: tuple[Change, ...]
    together: tuple[Change, ...]
    costs: dict[str, str]
    usable: int

    @classmethod
    def of(cls, config: RunConfig, models: RunModels, hardware: Hardware) -> FittingChanges:
        """Search for them; the configuration must have passed preflight, and does not fit."""
        usable = usable_bytes(hardware)
        together = needed(config, models, advice(config, models, hardware), usable)
        found = list(together) if len(together) == 1 else []
        recomputing = recomputing_everything(config, models, hardware)
        found += [recomputing] if recomputing is not None else []
        found += _layouts(config, models, usable)
        cutting = cutting_sequences(config, models, hardware)
        found += [cutting] if cutting is not None else []
        alone: list[Change] = []
        for change in found:
            has_another = any(other.settings.items() <= change.settings.items() for other in alone)
            if change.peak <= usable and not has_another:
                alone.append(change)
        costs = {} if recomputing is None else {str(recomputing): RECOMPUTE_COST}
        return cls(tuple(alone), tuple(together), costs, usable)

    @property
    def is_enough(self) -> bool:
        """Whether any change, or all of `together`, makes the plan fit."""
        return bool(self.alone) or any(change.peak <= self.usable for change in self.together[-1:])

    def lines(self) -> list[str]:
        """Return one line each: what alone is enough, then what is enough together."""
        heads = ("  one change is enough:", *("  or this one alone:" for _ in self.alone[1:]))
        lines = [
            f"{head} {change} (the worst rank then needs {amount(change.peak)}{self.costs.get(str(change), '')})"
            for head, change in zip(heads, self.alone, strict=False)
        ]
        if not self.together or (len(self.together) == 1 and self.alone):
            return lines if lines else ["  no change of this layout makes it fit: take more GPUs"]
        peak = amount(self.together[-1].peak)
        number = len(self.together)
        each = [f"    {change}" for change in self.together]
        if self.together[-1].peak <= self.usable:
            head = "or, without these," if lines else "no single change is enough;"
            return [*lines, f"  {head} all {number} of these together (the worst rank then needs {peak}):", *each]
        if lines:
            return lines
        all_of = f"these {number} together" if number > 1 else "this change"
        head = f"  no change makes it fit; {all_of} would save most, and the worst rank would still need {peak}:"
        return [head, *each, "  take more GPUs"]


def needed(config: RunConfig, models: RunModels, changes: Sequence[Change], usable: int) -> list[Change]:
    """Return the changes without those that the others make needless, each with the peak of all up to it."""
    kept = list(changes)
    if len(kept) < 2:
        return kept
    whole = _all(config, models, kept, usable)
    if whole is None:
        return kept
    for change in changes:
        rest = [one for one in kept if one is not change]
        without = _all(config, models, rest, usable) if rest else None
        if without is not None and sum(without.excess.values()) <= sum(whole.excess.values()):
            kept, whole = rest, without
    planned = [_all(config, models, kept[: number + 1], usable) for number in range(len(kept))]
    peaks = [(each or whole).change.peak for each in planned]
    return [Change(change.settings, peak) for change, peak in zip(kept, peaks, strict=True)]


def _all(config: RunConfig, models: RunModels, changes: Sequence[Change], usable: int) -> Tried | None:
    settings: dict[str, Any] = {}
    for change in changes:
        settings |= change.settings
    return tried(config, models, settings, usable)


def _layouts(config: RunConfig, models: RunModels, usable: int) -> list[Change]:
    """Return the changes to another layout that are enough by themselves."""
    pools = set(excess(plan_pools(models), usable))
    options = [tried(config, models, settings, usable) for settings in other_layouts(config, pools)]
    return [option.change for option in options if option is not None and not option.excess]


def misfit_notes(memory: MemoryReport, fitting: FittingChanges) -> list[str]:
    """Return the lines of a plan that does not fit."""
    over, where = amount(memory.peak - memory.usable), memory.where(memory.worst.pool)
    return [f"does not fit: the worst rank{where} needs {over} more than {memory.usable_text}", *fitting.lines()]


def changes_as_json(fitting: FittingChanges | None) -> list[dict[str, Any]]:
    """Settings of the changes that are enough together, with the bytes that the worst rank then needs."""
    return [{**change.settings, "peak_bytes": change.peak} for change in (fitting.together if fitting else ())]
