"""A rollout shard as a list of parts: each has its own tensors, exchange, byte bound and verifier.

A part's exchange reads training's memory, or memory of this rank's own in which something is made of training's weights
before the exchange: weights with adapters merged in, codes and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_rl.hybrid_engine.adapter_slots import AdapterSlots
from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel, Bytes
from megatron_rl.hybrid_engine.offload import HostBuffer
from megatron_rl.hybrid_engine.plan import ON_HOST


class OwnMemory(Protocol):
    """Memory with what a rank makes of its training shards; it can be released. label: its name in the memory plan."""

    label: str

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated now."""

    def renew(self) -> None:
        """Make it of the current weights."""

    def release(self) -> None:
        """Release the memory; the addresses stay."""


@dataclass
class ComposedPart:
    """One exchange of several. stays: what it brought stays on the device, and moves once. from_host: it moves once,
    too, and comes from `copy` in host memory for every later generation. Otherwise it moves for every generation.

    is_adapters: its tensors are adapters, which generation applies to those of the other parts.
    """

    exchange: AllGatherPPModel
    stays: bool = False
    from_host: bool = False
    is_adapters: bool = False
    copy: HostBuffer | None = None
    is_here: bool = False
    is_verified: bool = False


class ComposedWeights:
    """Several exchanges in one order on all ranks of the group; as `HybridEngine` expects it.

    tensors: of all of them, by name. lower_bound: the least that the last gather could bring.
    """

    def __init__(
        self, parts: Sequence[ComposedPart], made: Sequence[OwnMemory] = (), slots: AdapterSlots | None = None
    ) -> None:
        """made: what the exchanges read in addition to training's memory. slots: adapters of several copies, in place
        of a part with training's.
        """
        self.parts, self.made, self.slots = parts, made, slots
        self.lower_bound = Bytes(0, 0)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The rollout shard of every tensor of the model, by name."""
        return self._tensors(adapters=False)

    @property
    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """The rollout shard of every adapter [slots, rows, columns], by name; {} if generation reads none."""
        if self.slots is not None:
            return self.slots.tensors
        return {name: tensor[None] for name, tensor in self._tensors(adapters=True).items()}

    def _tensors(self, *, adapters: bool) -> dict[str, torch.Tensor]:
        asked = [part.exchange.tensors for part in self.parts if part.is_adapters == adapters]
        return {name: tensor for tensors in asked for name, tensor in tensors.items()}

    def gather(self) -> Bytes:
        """Renew this rank's own memory, and receive what is missing; returns the bytes that came from other ranks."""
        for own in self.made:
            own.renew()
        for part in self.parts:
            if part.copy is not None:
                part.exchange.take_from(part.copy)
                part.is_verified = False
        moved = [part for part in self.parts if not part.is_here and part.copy is None]
        received = [part.exchange.gather() for part in moved]
        for part in moved:
            part.is_here, part.is_verified = part.stays, False
            part.copy = part.exchange.copy_on_host() if part.from_host else None
        self.lower_bound = _sum([part.exchange.lower_bound for part in moved])
        return _sum(received)

    def verify(self) -> None:
        """Compare checksums of what moved since the last comparison. Raises WeightMismatchError."""
        for part in self.parts:
            if not part.is_verified:
                part.exchange.verify()
                part.is_verified = True

    def drop_training(self) -> None:
        """Release training's copies, as far as that is configured."""
        for part in self.parts:
            part.exchange.drop_training()

    def restore_training(self) -> None:
        """Undo `drop_training`."""
        for part in self.parts:
            part.exchange.restore_training()

    def memory(self) -> dict[str, int]:
        """Bytes next to training's buffers, by the names of the memory plan. Copies on the host count where it is the
        device.
        """
        held = [part.exchange.memory() for part in self.parts]
        named = {name: sum(each[name] for each in held) for name in held[0]}
        kept = [part for part in self.parts if part.from_host and not part.exchange.foreign.data.is_cuda]
        copies = sum(part.copy.num_bytes for part in kept if part.copy is not None)
        named |= {own.label: own.num_bytes for own in self.made}
        named |= {} if self.slots is None else self.slots.memory()
        return named | ({ON_HOST: copies} if kept else {})

    def release(self) -> None:
        """Release what was made, and what was brought and does not stay."""
        for own in self.made:
            own.release()
        for part in self.parts:
            if not part.stays:
                part.exchange.release()


def _sum(counts: Sequence[Bytes]) -> Bytes:
    return Bytes(sum(each.total for each in counts), sum(each.network for each in counts))
