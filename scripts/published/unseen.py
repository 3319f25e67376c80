"""The planner's clock against rows that it was not made with: steps, transfers, and what no estimate can be made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import yaml
from published.points import HERE, cost, hardware_of, transfer_seconds, unseen_points
from published.table import Judged, judged, median_error, rank_correlations

from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.time import BF16


def judged_unseen() -> list[Judged]:
    """Every unseen step. Its scalar is that of its cluster's known points, as they were; where there are none, the
    median of published / estimate of the other unseen points there.
    """
    known: dict[str, list[float]] = {}
    for one in judged():
        if one.point.against is None:
            known.setdefault(one.point.cluster, []).append(one.point.published / one.estimate)
    estimates = {point: point.estimate() for point in unseen_points()}
    steps = []
    for point, estimate in estimates.items():
        ratios = known.get(point.cluster) or [
            other.published / seconds
            for other, seconds in estimates.items()
            if other is not point and other.cluster == point.cluster
        ]
        steps.append(Judged(point, estimate, statistics.median(ratios) if ratios else None))
    return steps


@dataclass(frozen=True)
class Transfer:
    """A published transfer of weights to other ranks. num_bytes: of the model. published: seconds."""

    system: str
    way: str
    model: str
    source: str
    gpu: Hardware
    num_bytes: float
    senders: int
    rollout_tp: int
    published: float

    @property
    def cluster(self) -> str:
        """Transfers that share a scalar: one system's, in one way, on one GPU."""
        return f"{self.system} {self.way}, {self.gpu.name.upper()}"

    @property
    def needed(self) -> float:
        """Bytes of the shard that one rank generates with."""
        return self.num_bytes / self.rollout_tp

    @property
    def rate(self) -> float:
        """Bytes/s of its shard that a rank receives."""
        return self.needed / self.published

    @property
    def estimate(self) -> float:
        """The clock's seconds."""
        return transfer_seconds(self.num_bytes, self.senders, self.rollout_tp, self.gpu)

    @property
    def error(self) -> float:
        """Relative, as estimated: below 0 where the estimate is too fast."""
        return self.estimate / self.published - 1

    @property
    def scalar(self) -> float | None:
        """The median of published / estimate of the other transfers of its cluster; None if there is no other one."""
        others = [other for other in transfers() if other is not self and other.cluster == self.cluster]
        return statistics.median(other.published / other.estimate for other in others) if others else None

    @property
    def scaled_error(self) -> float | None:
        """After the scalar."""
        return None if self.scalar is None else self.estimate * self.scalar / self.published - 1


@cache
def transfers() -> tuple[Transfer, ...]:
    """All of `transfers.yaml`."""
    published = []
    for group in yaml.safe_load((HERE / "transfers.yaml").read_text()):
        for way, rows in group["ways"].items():
            for row in rows:
                params = row["params"] if "params" in row else cost(row["model"]).num_params
                gpu, num_bytes = hardware_of(row.get("hardware", "h100")), params * row.get("element", BF16)
                ends = (row["senders"], row["rollout_tp"], row["seconds"])
                published.append(Transfer(group["system"], way, row["model"], group["source"], gpu, num_bytes, *ends))
    return tuple(published)


def steps_table(steps: Sequence[Judged]) -> list[str]:
    """Lines of the steps."""
    lines = ["| step | published | estimate | error | after scalar | source |", "|---|---|---|---|---|---|"]
    for one in steps:
        after = "-" if one.scalar is None else f"{one.scaled_error:+.0%} ({one.scalar:.2f})"
        numbers = f"{one.point.published:.1f} s | {one.estimate:.1f} s | {one.error:+.0%} | {after}"
        lines.append(f"| {one.point.name} | {numbers} | {one.point.source} |")
    return lines


def errors_table(steps: Sequence[Judged]) -> list[str]:
    """Lines of median errors of each cluster: on policy and ahead, and of latent attention apart."""
    groups: dict[str, list[Judged]] = {}
    for one in steps:
        latent = "DeepSeek-V3" if "deepseek" in one.point.name else "grouped attention"
        when = "ahead" if one.point.ahead else "in turns"
        groups.setdefault(f"{one.point.cluster}, {latent}, {when}", []).append(one)
    lines = ["| steps of | rows | median error | after scalar | largest after it |", "|---|---|---|---|---|"]
    for name, inside in groups.items():
        raw = statistics.median(abs(one.error) for one in inside)
        largest = max((one.scaled_error for one in inside), key=abs)
        lines.append(f"| {name} | {len(inside)} | {raw:.0%} | {median_error(inside):.0%} | {largest:+.0%} |")
    return lines


def transfers_table(rows: Iterable[Transfer]) -> list[str]:
    """Lines of the transfers."""
    lines = [
        "| transfer | senders | a rank's shard | published | GB/s a rank | share of its link | estimate | error | "
        "after scalar | source |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        size, rate = f"{one.needed / 1e9:.1f} GB (1/{one.rollout_tp})", f"{one.rate / 1e9:.1f}"
        share = f"{one.rate / one.gpu.network_bandwidth:.0%}"
        after = "-" if one.scaled_error is None else f"{one.scaled_error:+.0%} ({one.scalar:.1f})"
        numbers = f"{one.published:.2f} s | {rate} | {share} | {one.estimate:.2f} s | {one.error:+.0%} | {after}"
        lines.append(f"| {one.cluster}: {one.model} | {one.senders} | {size} | {numbers} | {one.source} |")
    return lines


def missing_table() -> list[str]:
    """Lines of the rows that are not judged."""
    rows = yaml.safe_load((HERE / "missing.yaml").read_text())
    return [
        "| not judged | published | what is missing |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def markdown_tables() -> str:
    """The tables of docs/internals/planner_calibration.md."""
    unseen, moved = judged_unseen(), transfers()
    overall, inside = rank_correlations(unseen)
    raw = statistics.median(abs(one.error) for one in unseen)
    within = sum(abs(one.scaled_error) <= 0.15 for one in unseen if one.counts)
    off = statistics.median(abs(one.error) for one in moved)
    scaled = statistics.median(abs(one.scaled_error) for one in moved if one.scaled_error is not None)
    steps = (
        f"Of {len(unseen)} steps: median error {median_error(unseen):.0%} after the scalar, {raw:.0%} without; "
        f"{within} are within 15%. Kendall's tau is {overall:.2f} over all pairs, and {inside:.2f} over pairs of one "
        "cluster."
    )
    sent = f"Of {len(moved)} transfers: median error {scaled:.0%} after the scalar, {off:.0%} without."
    parts = (steps_table(unseen), [steps], errors_table(unseen), transfers_table(moved), [sent], missing_table())
    return "\n\n".join("\n".join(part) for part in parts)
