"""Published end-to-end points with known settings, and how far the time estimate is from each.

Two of them set the estimate's calibrated shares; all others are held out. Sources are named with every point.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.planner.hardware import Hardware, load_hardware
from megatron_rl.planner.run_models import PlannedModel
from megatron_rl.planner.time import Estimator, Layout, Load, ModelCost

MODELS = Path(__file__).parents[2] / "configs" / "models"
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
ISSUE = "NVIDIA-NeMo/RL issue 959, configs grpo_math_8B/70B_megatron.yaml"
SUMMARY = "NVIDIA-NeMo/RL, docs/about/performance-summary.md, v0.4"


@dataclass(frozen=True)
class Point:
    """One published number. seconds: measured. phases: of the estimate, that add up to the same."""

    name: str
    source: str
    model: ModelCost
    gpu: str
    layout: Layout
    load: Load
    seconds: float
    phases: tuple[str, ...]
    calibrates: str | None = None

    def estimate(self, hardware: Hardware | None = None, **changes: Any) -> float:
        """Seconds by our arithmetic; `changes`: other values of the load's fields."""
        estimator = Estimator(self.model, self.layout, hardware or load_hardware(self.gpu))
        load = dataclasses.replace(self.load, **changes)
        verbs: dict[str, Callable[[Load], float]] = {
            "train": estimator.train,
            "generation": estimator.generate,
            "log-prob": estimator.forward,
            "ref": estimator.forward,
        }
        return sum(verbs[phase](load) for phase in self.phases)

    @property
    def error(self) -> float:
        """Relative: above 0 where the estimate is too slow."""
        return self.estimate() / self.seconds - 1


@cache
def cost(name: str) -> ModelCost:
    """A model whose config.json comes with the project."""
    return ModelCost.of(PlannedModel.read(str(MODELS / name)))


def mpt(num_params: int, num_layers: int, hidden: int) -> ModelCost:
    """MPT: as many heads for keys as for queries, embedding and head in one matrix."""
    return ModelCost(num_params, num_params, num_layers, hidden, hidden, 4 * num_layers * hidden)


# llm-foundry's yamls: parameters at 2048 positions, layers, hidden size
MPT = {
    "70b": mpt(64_862_437_376, 80, 8192),
    "30b": mpt(29_975_214_080, 48, 7168),
    "13b": mpt(12_853_954_560, 40, 5120),
    "7b": mpt(6_658_859_008, 32, 4096),
}


def _foundry() -> Iterable[Point]:
    """(size, GPU, GPUs, samples a step, rows a pass, recomputed, tokens/s/GPU), all of 2048 tokens under FSDP."""
    rows = (
        ("70b", "h100", 64, 2048, 8, True, 1039),
        ("70b", "h100", 32, 1024, 2, True, 882),
        ("30b", "h100", 32, 1344, 14, True, 2308),
        ("30b", "h100", 8, 504, 3, True, 2002),
        ("13b", "h100", 64, 128, 2, False, 4800),
        ("13b", "h100", 8, 16, 2, False, 4792),
        ("7b", "h100", 8, 48, 6, False, 10643),
        ("70b", "a100", 64, 2048, 8, True, 410),
        ("70b", "a100", 32, 1024, 2, True, 373),
        ("30b", "a100", 8, 504, 3, True, 916),
        ("13b", "a100", 8, 48, 2, False, 2262),
        ("7b", "a100", 8, 96, 6, False, 4641),
    )
    for size, gpu, num_gpus, batch, micro, recompute, rate in rows:
        load = Load(
            num_samples=batch,
            prompt=0,
            response=2048,
            max_response=2048,
            mini_batch=batch,
            block_tokens=micro * 2048,
            recompute=float(recompute),
            efficiency_share=1.0,
            overlaps_dp=True,
        )
        seconds = batch * 2048 / (rate * num_gpus)
        calibrates = "matmul_efficiency" if size == "70b" and num_gpus == 64 else None
        name = f"MPT-{size} pretraining, {num_gpus} {gpu.upper()}"
        yield Point(name, FOUNDRY, MPT[size], gpu, Layout(num_gpus, 8), load, seconds, ("train",), calibrates)


def _reinforcement() -> Iterable[Point]:
    """GRPO of NeMo-RL on H100: 64 prompts x 32 samples, optimizer steps of 512 samples, passes of 4096 tokens packed.

    Its log-prob phase is that of the policy and of the reference. Prompts have 132 tokens: what the v0.4 table's
    tokens/s/GPU says of the same dataset beyond the answers.
    """
    base = Load(
        num_samples=2048,
        prompt=132,
        response=0,
        max_response=3964,
        mini_batch=512,
        block_tokens=4096,
        max_seqs=1024,
        overlaps_dp=True,
    )
    small, large = Layout(8, 8, pp=2), Layout(64, 8, tp=4, pp=4, rollout_tp=4)
    for name, layout, response, phases in (
        ("llama-3-8b", small, 795, {"train": 28, "generation": 58, "log-prob": 18}),
        ("llama-3-70b", large, 398, {"train": 28, "generation": 84, "log-prob": 18}),
    ):
        load = dataclasses.replace(base, response=response)
        for phase, seconds in phases.items():
            calibrates = None
            if name == "llama-3-8b":
                calibrates = {"train": "RL_SHARE", "generation": "DECODE_OVERHEAD"}.get(phase)
            title = f"{name} GRPO {phase}, {layout.num_gpus} H100"
            phases_of = ("log-prob", "ref") if phase == "log-prob" else (phase,)
            yield Point(title, ISSUE, cost(name), "h100", layout, load, seconds, phases_of, calibrates)
    for name, layout, response, step_s in (
        ("llama-3-8b", Layout(16, 8, pp=2), 1060, 97.7),
        ("qwen3-32b", Layout(32, 8, tp=4, pp=4, rollout_tp=4), 3206, 393),
        ("qwen3-30b-a3b", Layout(32, 8, tp=2, ep=8, rollout_tp=4), 3154, 225),
    ):
        load = dataclasses.replace(base, response=response)
        title = f"{name} GRPO step, {layout.num_gpus} H100"
        every_phase = ("train", "generation", "log-prob", "ref")
        yield Point(title, SUMMARY, cost(name), "h100", layout, load, step_s, every_phase)


def points() -> list[Point]:
    """All of them, those that calibrate first."""
    return sorted([*_foundry(), *_reinforcement()], key=lambda point: point.calibrates is None)


def calibrated() -> dict[str, float]:
    """The shares with which the points that set them have no error, by bisection; "matmul_efficiency GPU" for each."""
    found = {}
    for point in (point for point in points() if point.calibrates is not None):
        if point.calibrates == "matmul_efficiency":
            gpu = load_hardware(point.gpu)

            def seconds(value: float, point: Point = point, gpu: Hardware = gpu) -> float:
                return point.estimate(dataclasses.replace(gpu, matmul_efficiency=value))

            found[f"matmul_efficiency {point.gpu}"] = _solve(seconds, point.seconds, 1e-3, 1.0)
        else:
            field = {"RL_SHARE": "efficiency_share", "DECODE_OVERHEAD": "decode_overhead"}[str(point.calibrates)]

            def seconds_with(value: float, point: Point = point, field: str = field) -> float:
                changes: dict[str, Any] = {field: value}
                return point.estimate(**changes)

            bounds = (1e-3, 1.0) if field == "efficiency_share" else (0.1, 0.0)
            found[str(point.calibrates)] = _solve(seconds_with, point.seconds, *bounds)
    return found


def _solve(seconds: Callable[[float], float], wanted: float, slowest: float, fastest: float) -> float:
    """Where a monotonic function takes the value `wanted`, between two arguments."""
    for _ in range(60):
        middle = (slowest + fastest) / 2
        slowest, fastest = (middle, fastest) if seconds(middle) > wanted else (slowest, middle)
    return (slowest + fastest) / 2


def held_out_error() -> float:
    """Median of the absolute errors of the points that set nothing."""
    return statistics.median(abs(point.error) for point in points() if point.calibrates is None)


def markdown_table() -> str:
    """The table of docs/planner.md."""
    lines = ["| point | published s | estimate s | error | sets | source |", "|---|---|---|---|---|---|"]
    for point in points():
        sets = point.calibrates or "held out"
        numbers = f"{point.seconds:.1f} | {point.estimate():.1f} | {point.error:+.0%}"
        lines.append(f"| {point.name} | {numbers} | {sets} | {point.source} |")
    held = [point for point in points() if point.calibrates is None]
    worst = max(held, key=lambda point: abs(point.error))
    summary = f"Median error of the {len(held)} held-out points: {held_out_error():.0%}; the worst is {worst.name}"
    return "\n".join([*lines, "", f"{summary} ({worst.error:+.0%})."])
