"""Peaks of rehearsed phases next to the memory plan. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megatron_rl.config.schema import RunConfig
from megatron_rl.observe.summary import plain_table
from megatron_rl.planning.memory import INIT, RESHARD, StageMemory, plan_pools, without_moments
from megatron_rl.planning.run_models import RunModels

TOLERANCE = 0.02
"""Share of the plan by which a rehearsed peak may exceed it."""
SMALL = 100_000_000
"""Bytes that may be more all the same: copies of single tensors, which the plan does not count."""
NOT_REHEARSED = ("KV cache", "vLLM activations")
"""What vLLM holds, in the plan's names: no engine is rehearsed."""
GB = 1e9


@dataclass(frozen=True)
class Peak:
    """One phase of one rank. planned, rehearsed: bytes, without what vLLM holds."""

    rank: int
    pool: str
    pp_rank: int
    phase: str
    planned: int
    rehearsed: int

    @property
    def difference(self) -> float:
        """Rehearsed above planned, as a share of the plan."""
        return self.rehearsed / self.planned - 1

    @property
    def is_beyond(self) -> bool:
        """Whether the rehearsal needs more than the plan says, beyond the tolerance."""
        return self.difference > TOLERANCE and self.rehearsed - self.planned > SMALL


def peaks_of(config: RunConfig, reports: Sequence[Mapping[str, Any]]) -> list[Peak]:
    """Return every phase of every rank that has both a plan and a rehearsed peak. reports: the ranks' files."""
    plans = plan_pools(RunModels(config))
    peaks = []
    for report in reports:
        stage = plans[report["pool"]][report["pp_rank"]]
        for phase, memory in report["phases"].items():
            if phase in stage.phases:
                size = rehearsed_part(stage, phase)
                peaks.append(Peak(report["number"], report["pool"], report["pp_rank"], phase, size, memory["peak"]))
    return peaks


def rehearsed_part(stage: StageMemory, phase: str) -> int:
    """Return the bytes of a planned phase that a rehearsal has: all but vLLM's."""
    if phase == INIT:  # which may be largest with an engine
        # With a rollout in another pool each end of the weight transfer is built, and its memory for messages with it.
        ends = stage.exchanged or stage.phases.get(RESHARD, {})
        return max(sum(stage.built.values()), sum(without_moments(ends).values()))
    if phase == RESHARD and stage.exchanged:  # which may be largest when the cache has come
        return sum(stage.exchanged.values())
    return sum(size for name, size in stage.phases[phase].items() if name not in NOT_REHEARSED)


def peak_table(peaks: Sequence[Peak]) -> Table:
    """Return the largest peak of every phase and stage, in GB."""
    worst: dict[tuple[str, int, str], Peak] = {}
    for peak in peaks:
        key = (peak.pool, peak.pp_rank, peak.phase)
        if key not in worst or peak.rehearsed > worst[key].rehearsed:
            worst[key] = peak
    rows = [
        (
            *((peak.pool,) if len({one.pool for one in peaks}) > 1 else ()),
            str(peak.pp_rank),
            f"{peak.rank}",
            peak.phase,
            f"{peak.planned / GB:.2f}",
            f"{peak.rehearsed / GB:.2f}",
            f"{peak.difference:+.1%}{' too much' if peak.is_beyond else ''}",
        )
        for peak in worst.values()
    ]
    columns = (
        *(("pool",) if len({peak.pool for peak in peaks}) > 1 else ()),
        *("stage", "rank", "phase", "planned GB", "rehearsed GB", "difference"),
    )
    return plain_table("Peaks without what vLLM holds", columns, rows)


def beyond(peaks: Sequence[Peak]) -> list[str]:
    """Return a sentence for every peak that exceeds the plan by more than the tolerance."""
    return [
        f"rank {peak.rank}, {peak.phase}: {peak.rehearsed / GB:.2f} GB rehearsed and {peak.planned / GB:.2f} GB "
        f"planned, {peak.difference:+.1%}; at most {TOLERANCE:+.0%} is allowed"
        for peak in peaks
        if peak.is_beyond
    ]
