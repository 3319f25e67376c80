"""The rollout's weights where adapters are trained: a base that does not change, and adapters that do."""

from __future__ import annotations

import torch

from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel
from megatron_rl.hybrid_engine.composed_weights import ComposedPart, ComposedWeights


class AdaptedWeights(ComposedWeights):
    """Base and adapters of a rollout shard, each with an exchange of its own; as `HybridEngine` expects it.

    stays, from_host: of the base, see `ComposedPart`.
    tensors: of the base.
    """

    def __init__(self, base: AllGatherPPModel, adapters: AllGatherPPModel, stays: bool, from_host: bool) -> None:
        super().__init__([ComposedPart(base, stays, from_host), ComposedPart(adapters)])
        self.base, self.adapters = base, adapters
        self.adapter_tensors = adapters.tensors

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The rollout shard of the base, by name."""
        return self.base.tensors
