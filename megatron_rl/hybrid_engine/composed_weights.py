"""A rollout shard that several exchanges bring, each of its own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel, Bytes


@dataclass
class ComposedPart:
    """One exchange of several. stays: what it brought stays on the device, and moves once; otherwise it comes for every
    generation.
    """

    exchange: AllGatherPPModel
    stays: bool = False
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
        """Bring what is not here; returns what was received."""
        moved = [part for part in self.parts if not part.is_here]
        received = [part.exchange.gather() for part in moved]
        for part in moved:
            part.is_here, part.is_verified = part.stays, False
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
        """Bytes beside training's buffers, by the names of the memory plan."""
        held = [part.exchange.memory() for part in self.parts]
        return {name: sum(each[name] for each in held) for name in held[0]}

    def release(self) -> None:
        """Release what was brought and does not stay."""
        for part in self.parts:
            if not part.stays:
                part.exchange.release()


def _sum(counts: Sequence[Bytes]) -> Bytes:
    return Bytes(sum(each.total for each in counts), sum(each.network for each in counts))
