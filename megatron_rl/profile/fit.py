"""Fit the numbers of a hardware file to samples. Pure.

The planner's own estimate of FLOPs and bytes is subtracted from each sample, so that planned and measured seconds
agree. The rest is fitted by overheads of micro-batches, layers, tokens, steps and collectives, all >= 0, that minimise
relative errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_rl.planning.hardware import Hardware, Overheads
from megatron_rl.planning.layout_sizes import Layout
from megatron_rl.planning.step_load import COLLECTIVE_LATENCY, Load
from megatron_rl.planning.time import (
    ALL_COLLECTIVES,
    DP_COLLECTIVES,
    LINK_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Estimator,
    ModelCost,
)
from megatron_rl.profile.samples import (
    ALL_REDUCE,
    ATTENTION,
    COPY,
    GENERATE,
    HEAD_SIZE,
    HEADS,
    HOST_COPY,
    MATMUL,
    SCORE,
    SCORE_ALONE,
    SMALL,
    UPDATE,
    WIDTH,
    MeasuredSample,
    World,
)

REWEIGHINGS, NEAR = 20, 0.02
"""NEAR: a relative error that counts as none."""


@dataclass(frozen=True)
class Probe:
    """Estimates for the samples of one world. micro_batch: rows of a pass."""

    world: World
    cost: ModelCost
    dtype: str
    micro_batch: int

    @property
    def layers(self) -> int:
        return self.cost.num_layers

    @property
    def tp(self) -> int:
        return self.world.task.tp_size

    @property
    def cp(self) -> int:
        return self.world.task.cp_size

    def estimator(self, hardware: Hardware) -> Estimator:
        """Return the estimator of the world's layout, with a core for each rank."""
        num_ranks = self.world.task.world_size
        layout = Layout(num_ranks, num_ranks, tp=self.tp, rollout_tp=self.tp, cp=self.cp)
        return Estimator(self.cost, layout, replace(hardware, parallel_ranks=0.0), self.dtype)

    def load(self, sample: MeasuredSample) -> Load:
        """Return the load of a sample: equal lengths, and the same rows on every data-parallel rank."""
        length = sample.prompt + sample.response
        rows = sample.rows * (self.world.task.world_size // self.world.task.sharing)
        return Load(
            rows,
            sample.prompt,
            sample.response,
            sample.response,
            mini_batch=rows,
            block_tokens=self.micro_batch * length // self.cp,
        )

    def expected(self, hardware: Hardware, sample: MeasuredSample) -> float:
        """Return the estimated seconds on a rank with a core of its own."""
        estimator, load = self.estimator(hardware), self.load(sample)
        known: dict[str, Callable[[Load], float]] = {
            SCORE: estimator.forward,
            UPDATE: estimator.train,
            GENERATE: estimator.generate,
        }
        return known[sample.kind](load)

    def measured(self, hardware: Hardware, sample: MeasuredSample) -> float:
        """Return the measured seconds, corrected to a rank with a core of its own."""
        return sample.seconds / hardware.crowding(self.world.task.world_size)

    def blocks(self, sample: MeasuredSample) -> int:
        """Return the number of micro-batches."""
        return -(-sample.rows // self.micro_batch)


@dataclass
class Equations:
    """Linear equations, weighted so that errors are relative to the `whole` of a sample."""

    rows: list[list[float]] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)

    def add(self, coefficients: Sequence[float], rest: float, whole: float) -> None:
        """Add a sample: `coefficients` times the unknowns equal `rest`, a part of `whole` seconds."""
        self.rows.append([number / whole for number in coefficients])
        self.sums.append(rest / whole)

    def solve(self) -> list[float]:
        """Return unknowns >= 0 with the least sum of absolute errors, by iteratively reweighted least squares.

        A sample that something else slowed down thus counts little.
        """
        matrix, sums = np.array(self.rows), np.array(self.sums)
        solution = not_negative(matrix, sums)
        for _ in range(REWEIGHINGS):
            weight = np.sqrt(1 / np.maximum(np.abs(matrix @ np.array(solution) - sums), NEAR))
            solution = not_negative(matrix * weight[:, None], sums * weight)
        return solution


def not_negative(matrix: np.ndarray, sums: np.ndarray) -> list[float]:
    """Return the least-squares x >= 0 of matrix x = sums (Lawson and Hanson, Solving Least Squares Problems).

    `scipy.optimize.nnls` does the same; nothing else here needs scipy, a download of 35 MB.
    """
    # Columns are scaled to norm 1: seconds of a token and of a step differ by orders of magnitude.
    size = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(size > 0, size, 1.0)
    solution, free = np.zeros(scaled.shape[1]), np.zeros(scaled.shape[1], dtype=bool)
    for _ in range(10 * scaled.shape[1]):
        slope = scaled.T @ (sums - scaled @ solution)
        slope[free] = -np.inf
        if free.all() or slope.max() <= 1e-9 * max(1.0, float(np.abs(sums).max())):
            break
        free[int(slope.argmax())] = True
        tried = _solved(scaled, sums, free)
        while tried[free].min() < 0:
            below = free & (tried < 0)
            share = (solution[below] / (solution[below] - tried[below])).min()
            solution = solution + share * (tried - solution)
            free &= solution > 1e-12
            tried = _solved(scaled, sums, free)
        solution = tried
    return [float(value) for value in solution / np.where(size > 0, size, 1.0)]


def _solved(matrix: np.ndarray, sums: np.ndarray, free: np.ndarray) -> np.ndarray:
    solution = np.zeros(matrix.shape[1])
    if free.any():
        solution[free] = np.linalg.lstsq(matrix[:, free], sums, rcond=None)[0]
    return solution


def fit_overheads(base: Hardware, alone: Sequence[Probe]) -> Overheads:
    """Fit the overheads of single ranks. base: hardware without overheads. alone: models of several depths."""
    base = replace(base, overheads=replace(base.overheads, engine_step=0.0))
    score, update, draw = Equations(), Equations(), Equations()
    for probe in alone:
        for sample in probe.world.of(SCORE, UPDATE, GENERATE):
            whole = probe.measured(base, sample)
            rest = whole - probe.expected(base, sample)
            layers, rows = probe.layers, sample.rows
            tokens = rows * (sample.prompt + sample.response) * layers * probe.cost.hidden
            blocks = probe.blocks(sample)
            if sample.kind == SCORE:
                score.add([blocks, blocks * layers, tokens], rest, whole)
            elif sample.kind == UPDATE:
                update.add([blocks, blocks * layers, tokens, 1, layers], rest, whole)
            else:
                steps = sample.response
                draw.add([1, rows, steps, steps * layers, steps * rows], rest, whole)
    names = ("generation", "request", "engine_step", "engine_layer", "engine_sequence")
    return replace(
        base.overheads,
        **dict(zip(("score_pass", "score_layer", "score_token"), score.solve(), strict=True)),
        **dict(
            zip(
                ("update_pass", "update_layer", "update_token", "optimizer_step", "optimizer_layer"),
                update.solve(),
                strict=True,
            )
        ),
        **dict(zip(names, draw.solve(), strict=True)),
    )


def fit_collectives(known: Hardware, cut: Sequence[Probe]) -> tuple[dict[int, float], dict[int, float]]:
    """Fit the latency of collectives by group size, in training and in the engine, to tensor-parallel passes.

    known: hardware with overheads, without collectives.
    """
    sizes = sorted({probe.tp for probe in cut})
    training, engine = Equations(), Equations()
    for probe in cut:
        num_ranks = probe.world.task.world_size
        for sample in probe.world.of(SCORE, UPDATE, GENERATE):
            whole = probe.measured(known, sample)
            rest = whole - probe.expected(known, sample)
            numbers = dict.fromkeys(sizes, 0.0)
            if sample.kind == GENERATE:
                numbers[probe.tp] += sample.response * (2 * probe.layers + 2)
                rest += 2 * probe.layers * sample.response * COLLECTIVE_LATENCY  # in the estimate by default
                engine.add(list(numbers.values()), rest, whole)
                continue
            numbers[probe.tp] += (2 if sample.kind == SCORE else 4) * (probe.layers + 1) * probe.blocks(sample)
            if sample.kind == UPDATE:
                for size, number in ((num_ranks // probe.tp, DP_COLLECTIVES), (num_ranks, ALL_COLLECTIVES)):
                    if size in numbers:
                        numbers[size] += number
            training.add(list(numbers.values()), rest, whole)
    return (
        dict(zip(sizes, training.solve(), strict=True)) if sizes else {},
        dict(zip(sizes, engine.solve(), strict=True)) if sizes else {},
    )


def fit_context(known: Hardware, cut: Sequence[Probe]) -> Overheads:
    """Fit the overheads of context-parallel passes. known: hardware with all other numbers."""
    equations = Equations()
    for probe in cut:
        for sample in probe.world.of(SCORE, UPDATE):
            whole = probe.measured(known, sample)
            rest = whole - probe.expected(known, sample)
            forward = (1 if sample.kind == SCORE else 3) * (probe.cp - 1) * probe.layers
            tokens = sample.rows * (sample.prompt + sample.response) / probe.cp
            numbers = [forward * probe.blocks(sample), forward * tokens * probe.cost.hidden / probe.tp]
            equations.add(numbers, rest, whole)
    layer, token = equations.solve() if equations.rows else (0.0, 0.0)
    return replace(known.overheads, context_layer=layer, context_token=token)


def errors(hardware: Hardware, probes: Sequence[Probe]) -> list[float]:
    """Return the relative error of the estimate of each sample."""
    return [
        probe.expected(hardware, sample) / probe.measured(hardware, sample) - 1
        for probe in probes
        for sample in probe.world.of(SCORE, UPDATE, GENERATE)
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def half_rows(samples: Sequence[MeasuredSample], width: float) -> tuple[float, float]:
    """Fit products with a square matrix: return FLOP/s of many rows, and the rows at which half of that is reached.

    seconds = 2 width^2 (rows + half) / rate is a straight line in the rows.
    """
    equations = Equations()
    for sample in samples:
        equations.add([sample.size, 1.0], sample.seconds, sample.seconds)
    per_row, fixed = equations.solve()
    per_row = per_row or min(sample.seconds / sample.size for sample in samples)
    return 2 * width**2 / per_row, fixed / per_row


def parallel_ranks(alone: MeasuredSample, together: MeasuredSample, num_ranks: int, num_cores: int) -> float:
    """Return how many ranks can compute at the same time: the speedup of all ranks over one, at most what cores allow.

    A rank has its share of whole cores, or one.
    """
    most = min(num_ranks, num_cores / max(1, num_cores // num_ranks))
    return max(1.0, min(float(most), num_ranks * alone.seconds / together.seconds))


def turns_share(together: World, shared: float) -> float:
    """Return the share of the speed of `shared` ranks that is left while data-parallel groups share the cores.

    It is the seconds that a group should need with the others, computed from those alone, over the measured ones.
    1 where ranks do not wait, or nothing was measured.
    """
    crowded, alone = together.of(SCORE), together.of(SCORE_ALONE)
    num_ranks, group = together.task.world_size, together.task.tp_size
    if not alone or num_ranks <= shared:
        return 1.0
    ideal = num_ranks / max(shared, group)
    pairs = zip(alone, crowded, strict=True)
    shares = sorted(ideal * by_itself.seconds / with_others.seconds for by_itself, with_others in pairs)
    return min(1.0, shares[len(shares) // 2])


CONTEXT_BYTES = {"cpu": 0.7e9, "cuda": 2.0e9}


def base_hardware(
    alone: World, together: World | None, memory_bytes: float, dtype: str, num_ranks: int, num_cores: int
) -> Hardware:
    """Return the rates of a machine, without overheads.

    alone: kernels of one rank. together: kernels and collectives of all ranks at the same time; None: there is one
    rank. dtype: of the roles.
    """
    device, width = alone.task.device, WIDTH[alone.task.device]
    rates = {name: half_rows(alone.of(f"{MATMUL} {name}"), width) for name in ("float32", "bfloat16")}
    shared, turns = 0.0, 1.0
    if device == "cpu":
        everyone = (together or alone).of(SMALL)[0]
        shared = parallel_ranks(alone.of(SMALL)[0], everyone, num_ranks, num_cores)
        turns = turns_share(together or alone, shared)
    crowding = num_ranks / (shared * turns) if shared and num_ranks > shared else 1.0
    crowded = crowding if together is not None else 1.0
    copying = (together or alone).of(COPY)[0]
    link = copying.size / copying.seconds if together is None else _link_bandwidth(together, crowded)
    host = alone.of(HOST_COPY)[0]
    peak = rates[dtype][0]
    return Hardware(
        "profiled",
        memory_bytes=memory_bytes,
        bfloat16_flops=rates["bfloat16"][0],
        float32_flops=rates["float32"][0],
        # A copy reads and writes; the clock takes a share of the data sheet's number.
        memory_bandwidth=2 * copying.size / copying.seconds * crowded / MEMORY_EFFICIENCY,
        link_bandwidth=link,
        network_bandwidth=link,
        matmul_efficiency=1.0,
        context_bytes=CONTEXT_BYTES[device],
        host_bandwidth=host.size / host.seconds,
        half_rows=rates[dtype][1],
        attention_share=_attention_share(alone.of(ATTENTION)[0], peak),
        parallel_ranks=shared,
        turns_share=turns,
        overheads=Overheads(call=0.0, launch=0.0),
    )


def _link_bandwidth(together: World, crowding: float) -> float:
    """Return bytes/s of one rank with a core of its own, from an all-reduce of all ranks."""
    num_ranks, (reduce,) = together.task.world_size, together.of(ALL_REDUCE)
    sent = 2 * (num_ranks - 1) / num_ranks * reduce.size
    return sent / (reduce.seconds / crowding) / LINK_EFFICIENCY


def _attention_share(attention: MeasuredSample, peak: float) -> float:
    """Return attention's share of the rate of matrix products; causal attention counts as half of the square."""
    flops = 2 * HEADS * HEAD_SIZE * attention.size**2
    return min(1.0, flops / attention.seconds / peak)
