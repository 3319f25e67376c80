"""Switch between training and generation: `enter` brings the whole rollout shard and the KV cache, `exit` undoes it.

Phases of `enter`: random state, offloading, weights, verification, the training copy, KV cache. `exit` undoes them in
reverse order, and so does `enter` itself if one of them fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.device import Device, release_cached, settled_seconds
from megatron_rl.hybrid_engine.allgather_pp import Bytes
from megatron_rl.hybrid_engine.offload import Offloadable, offloaded
from megatron_rl.hybrid_engine.rng import RNGState, swap
from megatron_rl.hybrid_engine.verify import is_verified


class Generator(Protocol):
    """The part of a rollout engine that the hybrid engine uses."""

    def wake(self) -> None:
        """Allocate the KV cache and drop every cached prefix, because the weights have changed."""

    def sleep(self) -> None:
        """Release the KV cache, if it is allocated."""


class Weights(Protocol):
    """The weights that generation reads."""

    @property
    def lower_bound(self) -> Bytes:
        """The least that this rank can receive in one resharding."""

    def gather(self) -> Bytes:
        """Bring missing weights; returns the bytes received."""

    def verify(self) -> None:
        """Compare checksums. Raises WeightMismatchError."""

    def release(self) -> None:
        """Release the memory."""

    def drop_training(self) -> None:
        """Release training's copy, if that is configured."""

    def restore_training(self) -> None:
        """Undo `drop_training`."""


@dataclass(frozen=True)
class TransitionReport:
    """The cost of `enter` on this rank. verify_seconds: comparing checksums; 0 if this resharding was not verified.

    network_bytes: bytes received from other nodes. network_bound_bytes: the part of the exchange group's weights that
    the node does not have and that this rank fetches. changed_share: of the model's elements, if only what changed
    travelled; the numbers of all bytes then count what says where it changed.
    """

    bytes_received: int
    lower_bound_bytes: int
    network_bytes: int
    network_bound_bytes: int
    seconds: float
    exchange_seconds: float
    verify_seconds: float
    changed_share: float | None = None


class HybridEngine:
    """Switches one rank between train and rollout mode. Every rank must enter and exit together.

    device: phases are timed with their work on the device. offloadable: memory that is offloaded during generation.
    verify_every: compare checksums at the first entry and at every Nth later one; 0: at the first only. After an
    exception in `enter` or `exit` the rank is in train mode with its weights intact.
    rollout_rng: the random state at the end of the last generation; None before the first.
    """

    def __init__(
        self,
        weights: Weights,
        generator: Generator,
        device: Device,
        offloadable: Sequence[Offloadable] = (),
        verify_every: int = 1,
    ) -> None:
        self.weights = weights
        self.generator = generator
        self._device = device.torch_device
        self.offloadable = offloadable
        self.verify_every = verify_every
        self._num_entries = 0
        self._undo: ExitStack | None = None
        self.rollout_rng: RNGState | None = None

    @property
    def in_rollout(self) -> bool:
        return self._undo is not None

    def enter(self) -> TransitionReport:
        """Bring the current weights and the KV cache. Raises WeightMismatchError if a moved weight is wrong."""
        if self.in_rollout:
            raise RuntimeError("enter() in rollout mode: exit() comes first")
        start = settled_seconds(self._device)
        with ExitStack() as undo:
            # Phase 1: random state
            undo.callback(self._restore_rng, swap(self.rollout_rng))
            # Phase 2: offloading
            undo.enter_context(offloaded(self.offloadable))
            # The next allocations have other sizes, and another allocator than torch's may make them.
            release_cached(self._device)
            # Phase 3: weights
            undo.callback(self.weights.release)
            before_exchange = settled_seconds(self._device)
            received = self.weights.gather()
            # Phase 4: verification, before anything is generated from them
            before_verify = settled_seconds(self._device)
            if is_verified(self._num_entries, self.verify_every):
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
        """Undo every phase of `enter`, each even if another one fails. Does nothing in train mode."""
        if self._undo is not None:
            undo, self._undo = self._undo, None
            try:
                undo.close()
            finally:
                release_cached(self._device)

    def _restore_rng(self, train_rng: RNGState) -> None:
        self.rollout_rng = swap(train_rng)
