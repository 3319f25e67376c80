"""A rollout shard that several exchanges bring, each of its own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel, Bytes
from megatron_rl.hybrid_engine.plan import ON_HOST


@dataclass
class ComposedPart:
    """One exchange of several. stays: what it brought stays on the device, and moves once. from_host: it moves once,
    too, and comes from `copy` in host memory for every later generation. Otherwise it moves for every generation.
    """

    exchange: AllGatherPPModel
    stays: bool = False
    from_host: bool = False
    copy: torch.Tensor | None = None
    is_here: bool = False
    is_verified: bool = False


class ComposedWeights:
    """Several exchanges in one order on all ranks of the group; as `HybridEngine` expects it.

    tensors: of all of them, by name. lower_bound: the least that the last gather could bring.
    """

    def __init__(self, parts: Sequence[ComposedPart]) -> None:
        self.parts = parts
        self.lower_bound = Bytes(0, 0)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The rollout shard of every tensor, by name."""
        return {name: tensor for part in self.parts for name, tensor in part.exchange.tensors.items()}

    def gather(self) -> Bytes:
        """Bring what is not here; returns what was received from other ranks."""
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
        copies = sum(part.copy.nbytes for part in kept if part.copy is not None)
        return named | ({ON_HOST: copies} if kept else {})

    def release(self) -> None:
        """Release what was brought and does not stay."""
        for part in self.parts:
            if not part.stays:
                part.exchange.release()


def _sum(counts: Sequence[Bytes]) -> Bytes:
    return Bytes(sum(each.total for each in counts), sum(each.network for each in counts))
