"""Where the time of a GRPO step goes: seconds of parts of this package, of vLLM and of Megatron, each without the parts
that it calls. `step.py --arms parts` prints them.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
EXECUTOR = "vllm.v1.executor.uniproc_executor:UniProcExecutor."
SCHEDULES = "megatron.core.pipeline_parallel.schedules:"
PIPELINE = "megatron_rl.roles.pipeline:Pipeline."
PARTS = {
    "requests begin": ["megatron_rl.rollout.in_flight_requests:InFlightRequests._start"],
    "vLLM's scheduler": ["vllm.v1.core.sched.scheduler:Scheduler.schedule"],
    "vLLM's rows": [RUNNER + "_update_states"],
    "input preparation": [RUNNER + "_prepare_inputs", RUNNER + "_get_slot_mappings", RUNNER + "_preprocess"],
    "attention's metadata": [RUNNER + "_build_attention_metadata"],
    "rest of the runner": [EXECUTOR + "execute_model", EXECUTOR + "sample_tokens"],
    "forward": [RUNNER + "_model_forward"],
    "head": ["vllm.model_executor.layers.logits_processor:LogitsProcessor.forward"],
    "sampler": [RUNNER + "_sample"],
    "tokens to lists": [RUNNER + "_bookkeeping_sync"],
    "output": [
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    ],
    "rest of vLLM's loop": ["vllm.v1.engine.core_client:InprocClient.get_output"],
    "slices": ["megatron_rl.rollout.engine:RolloutEngine.advance"],
    "transitions": [f"megatron_rl.hybrid_engine.hybrid_engine:HybridEngine.{name}" for name in ("enter", "exit")],
    "records": ["megatron_rl.sampling.pool_sampler:PoolSampler.next"],
    "scoring": [f"megatron_rl.scoring.batch_scorers:RewardScorer.{name}" for name in ("start", "take")],
    "advantages": ["megatron_rl.controller.algorithm:Algorithm.add_advantages"],
    "reference": ["megatron_rl.roles.scoring_roles:Reference.log_probs"],
    "packing": [PIPELINE + "micro_batches", PIPELINE + "_passes"],
    "update, forward": [SCHEDULES + "forward_step"],
    "update, backward": [SCHEDULES + "backward_step"],
    "update, optimizer": ["megatron_rl.roles.training:TrainableModel.step"],
    "rest of the update": ["megatron_rl.roles.actor:Actor.update_on_policy"],
    "metrics": ["megatron_rl.controller.run:Run.describe"],
}
"""Part -> its functions. Those of vLLM's own code are named where they are defined."""
INSIDE = {"update, forward": "reference"}
"""Parts that count as another one inside it."""
REST = "rest of the step"


class PartClock:
    """Wall and CPU seconds of the parts of the thread that takes the steps. CPU seconds are those of all threads."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._open, self._last = [REST], self._now()

    def watch(self, part: str, place: str) -> None:
        """Count a function, `module:name` or `module:class.name`, as a part."""
        module, path = place.split(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, name, self._timed(part, getattr(owner, name)))

    def take(self) -> dict[str, list[float]]:
        """Part -> (wall seconds, CPU seconds) since the last call."""
        self._count()
        seconds, self._seconds = dict(self._seconds), defaultdict(lambda: [0.0, 0.0])
        return seconds

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._count()
            around = INSIDE.get(part)
            self._open.append(around if around in self._open else part)
            try:
                return function(*args, **kwargs)
            finally:
                self._count()
                self._open.pop()

        return timed

    def _count(self) -> None:
        now = self._now()
        for place, (stop, start) in enumerate(zip(now, self._last, strict=True)):
            self._seconds[self._open[-1]][place] += stop - start
        self._last = now

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def watched() -> PartClock:
    """A clock of all parts; the run must be open, as libraries are changed while they are read."""
    clock = PartClock()
    for part, places in PARTS.items():
        for place in places:
            clock.watch(part, place)
    return clock


def print_parts(steps: Sequence[dict[str, list[float]]]) -> None:
    """Medians of the steps, in milliseconds."""
    total = median(sum(cpu for _, cpu in step.values()) for step in steps)
    print(f"  {'part':24}{'wall ms':>9}{'CPU ms':>9}{'of CPU':>9}")
    for part in [*PARTS, REST]:
        wall, cpu = (median(step.get(part, [0.0, 0.0])[kind] for step in steps) for kind in (0, 1))
        print(f"  {part:24}{1000 * wall:9.1f}{1000 * cpu:9.1f}{cpu / total:9.1%}")
