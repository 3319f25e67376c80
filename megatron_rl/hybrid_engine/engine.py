"""Between training and generation: `enter` makes the whole model and the KV cache present, `exit` takes them away."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel
from megatron_rl.hybrid_engine.rng import RNGState, swap


class Generator(Protocol):
    """What the hybrid engine asks of a rollout engine."""

    def wake(self) -> None:
        """Take the KV cache and forget every cached prefix: the weights have changed."""

    def sleep(self) -> None:
        """Give the KV cache back."""


@dataclass(frozen=True)
class TransitionReport:
    """What entering cost this rank."""

    bytes_received: int
    lower_bound_bytes: int
    seconds: float


class HybridEngine:
    """Switches one rank between train and rollout mode. Every rank must enter and exit together.

    An exception while entering leaves the rank in train mode with its weights untouched: training's memory is only
    ever read here.
    """

    def __init__(self, weights: AllGatherPPModel, generator: Generator) -> None:
        self.weights = weights
        self.generator = generator
        self.in_rollout = False
        self._train_rng: RNGState | None = None
        self._rollout_rng: RNGState | None = None

    def enter(self) -> TransitionReport:
        """Bring the other stages' current weights and the KV cache; the training RNG is set aside."""
        if self.in_rollout:
            raise RuntimeError("enter() in rollout mode: exit() comes first")
        start = time.perf_counter()
        # Phase 1: random state
        self._train_rng = swap(self._rollout_rng)
        try:
            # Phase 2: weights
            self.weights.gather()
            # Phase 3: KV cache, no stale prefix
            self.generator.wake()
        except BaseException:
            swap(self._train_rng)
            self._release()
            raise
        self.in_rollout = True
        seconds = time.perf_counter() - start
        return TransitionReport(self.weights.bytes_received, self.weights.lower_bound_bytes, seconds)

    def exit(self) -> None:
        """Release the KV cache and the other stages, put the training RNG back; nothing happens in train mode."""
        if not self.in_rollout:
            return
        self._rollout_rng = swap(self._train_rng)
        self.in_rollout = False
        self._release()

    def _release(self) -> None:
        """Give back the KV cache, and the other stages' memory even when that fails."""
        try:
            self.generator.sleep()
        finally:
            self.weights.release()
