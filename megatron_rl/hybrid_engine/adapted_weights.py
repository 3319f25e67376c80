"""The rollout's weights where adapters are trained: a base that does not change, and adapters that do."""

from __future__ import annotations

from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel, Bytes


class AdaptedWeights:
    """Base and adapters of a rollout shard, each with an exchange of its own; as `HybridEngine` expects it.

    keeps_base: what the base brought stays on the device, and moves once; otherwise it comes for every generation.
    """

    def __init__(self, base: AllGatherPPModel, adapters: AllGatherPPModel, keeps_base: bool) -> None:
        self.base, self.adapters, self.keeps_base = base, adapters, keeps_base
        self.tensors, self.adapter_tensors = base.tensors, adapters.tensors
        self._has_base = self._is_verified = False
        self.lower_bound = Bytes(0, 0)
        """The least that the last gather could bring."""

    def gather(self) -> Bytes:
        """Bring the adapters, and the base where it is not here."""
        moved = [self.adapters] if self._has_base else [self.base, self.adapters]
        self._is_verified = self._is_verified and self._has_base
        self._has_base = True
        received = [each.gather() for each in moved]
        bounds = [each.lower_bound for each in moved]
        self.lower_bound = Bytes(*map(sum, zip(*bounds, strict=True)))
        return Bytes(*map(sum, zip(*received, strict=True)))

    def verify(self) -> None:
        """Compare checksums of what moved since the last comparison. Raises WeightMismatchError."""
        if not self._is_verified:
            self.base.verify()
            self._is_verified = True
        self.adapters.verify()

    def drop_training(self) -> None:
        """Release training's copy of the base, if that is configured."""
        self.base.drop_training()

    def restore_training(self) -> None:
        """Undo `drop_training`."""
        self.base.restore_training()

    def memory(self) -> dict[str, int]:
        """Bytes beside training's buffers, by the names of the memory plan."""
        held = [each.memory() for each in (self.base, self.adapters)]
        return {name: sum(each[name] for each in held) for name in held[0]}

    def release(self) -> None:
        """Release what was brought and does not stay."""
        if not self.keeps_base:
            self.base.release()
            self._has_base = False
        self.adapters.release()
