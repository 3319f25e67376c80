"""Between training and generation: `enter` makes the whole rollout shard and the KV cache present, `exit` undoes it.

Phases of `enter`: random state, memory that rests, weights, verification, the training copy, KV cache. `exit` takes
them back in reverse order; so does `enter` itself when one of them fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.device import Device, release_cached, settled_seconds
from megatron_rl.hybrid_engine.allgather_pp import Bytes
from megatron_rl.hybrid_engine.offload import Resting
from megatron_rl.hybrid_engine.rng import RNGState, swap


class Generator(Protocol):
    """What the hybrid engine asks of a rollout engine."""

    def wake(self) -> None:
        """Take the KV cache and forget every cached prefix: the weights have changed."""

    def sleep(self) -> None:
        """Give the KV cache back; it may not have been taken."""


class Weights(Protocol):
    """What the hybrid engine asks of the weights that generation reads."""

    @property
    def lower_bound(self) -> Bytes:
        """The least that this rank can receive in one transition."""

    def gather(self) -> Bytes:
        """Bring what is missing; what it cost."""

    def verify(self) -> None:
        """Compare checksums. Raises WeightMismatchError."""

    def release(self) -> None:
        """Give the memory back."""

    def drop_training(self) -> None:
        """Give training's copy back, where that is configured."""

    def restore_training(self) -> None:
        """Take it again."""


@dataclass(frozen=True)
class TransitionReport:
    """What entering cost this rank. verify_seconds: comparing checksums, 0 when this transition had none.

    network_bytes: of the bytes received, those that came from other nodes. network_bound_bytes: what its node lacks
    of the exchange group's weights, where this rank is the one that fetches it.
    """

    bytes_received: int
    lower_bound_bytes: int
    network_bytes: int
    network_bound_bytes: int
    seconds: float
    exchange_seconds: float
    verify_seconds: float


class HybridEngine:
    """Switches one rank between train and rollout mode. Every rank must enter and exit together.

    device: every phase is timed with what it gave the device to do. resting: what leaves while generating.
    verify_every: compare checksums at the first entry and at every so many later ones; 0: at the first only. An
    exception while entering or leaving leaves the rank in train mode with its weights intact.
    rollout_rng: the generators' state at the end of the last generation; None before the first.
    """

    def __init__(
        self,
        weights: Weights,
        generator: Generator,
        device: Device,
        resting: Sequence[Resting] = (),
        verify_every: int = 1,
    ) -> None:
        self.weights = weights
        self.generator = generator
        self._device = device.torch_device
        self.resting = resting
        self.verify_every = verify_every
        self._num_entries = 0
        self._undo: ExitStack | None = None
        self.rollout_rng: RNGState | None = None

    @property
    def in_rollout(self) -> bool:
        return self._undo is not None

    def enter(self) -> TransitionReport:
        """Bring the current weights and the KV cache. Raises WeightMismatchError when a moved weight is wrong."""
        if self.in_rollout:
            raise RuntimeError("enter() in rollout mode: exit() comes first")
        start = settled_seconds(self._device)
        with ExitStack() as undo:
            # Phase 1: random state
            undo.callback(self._restore_rng, swap(self.rollout_rng))
            # Phase 2: memory that rests
            for resting in self.resting:
                undo.callback(resting.come_back)
                resting.leave()
            # What comes next is of other sizes, and may be taken by somebody else than torch's allocator.
            release_cached(self._device)
            # Phase 3: weights
            undo.callback(self.weights.release)
            before_exchange = settled_seconds(self._device)
            received = self.weights.gather()
            # Phase 4: verification, before anything is generated from them
            before_verify = settled_seconds(self._device)
            if self._is_verified(self._num_entries):
                self.weights.verify()
            after_verify = settled_seconds(self._device)
            # Phase 5: the training copy
            undo.callback(self.weights.restore_training)
            self.weights.drop_training()
            # Phase 6: KV cache, no stale prefix
            undo.callback(self.generator.sleep)
            self.generator.wake()
            self._undo = undo.pop_all()
        self._num_entries += 1
        bound = self.weights.lower_bound
        return TransitionReport(
            received.total,
            bound.total,
            received.network,
            bound.network,
            seconds=settled_seconds(self._device) - start,
            exchange_seconds=before_verify - before_exchange,
            verify_seconds=after_verify - before_verify,
        )

    def exit(self) -> None:
        """Take back every phase of `enter`, each even when another fails; nothing happens in train mode."""
        if self._undo is not None:
            undo, self._undo = self._undo, None
            try:
                undo.close()
            finally:
                release_cached(self._device)

    def _is_verified(self, entry: int) -> bool:
        """The first always is: a wrong plan or a wrong order of messages is wrong from the start."""
        return entry == 0 or (self.verify_every > 0 and entry % self.verify_every == 0)

    def _restore_rng(self, train_rng: RNGState) -> None:
        self.rollout_rng = swap(train_rng)
