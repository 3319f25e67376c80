"""Which layers run their forward pass again for their backward pass, and what is kept then: arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.megatron import MegatronConfig


@dataclass(frozen=True)
class Recompute:
    """One role's recomputed activations, as Megatron's transformer block reads the settings; None: none.

    method: uniform makes all layers of a chunk again, in runs of `num_layers`, block the first `num_layers` of it,
    one by one (Korthikanti et al., arXiv:2205.05198).
    """

    method: str | None = None
    num_layers: int = 0

    @classmethod
    def of(cls, megatron: MegatronConfig) -> Recompute:
        """Of a configuration that has passed preflight."""
        override = megatron.override_transformer_config
        if override.recompute_granularity is None:
            return cls()
        return cls(override.recompute_method, override.recompute_num_layers or 0)

    def again(self, num_layers: int) -> int:
        """Layers of a chunk of `num_layers` that run twice."""
        if self.method is None:
            return 0
        return num_layers if self.method == "uniform" else min(self.num_layers, num_layers)

    def share(self, chunks: Sequence[int]) -> float:
        """Share of all layers that run twice, in chunks of these sizes."""
        return sum(map(self.again, chunks)) / sum(chunks)

    def kept_bytes(self, num_layers: int, input_bytes: float, saved_bytes: float) -> float:
        """What a pass through a chunk keeps between forward and backward.

        input_bytes, saved_bytes: of one layer, its input alone and all that its backward needs.
        """
        again = self.again(num_layers)
        run = self.num_layers if self.method == "uniform" else 1
        return again / run * input_bytes + (num_layers - again) * saved_bytes

    def made_bytes(self, num_layers: int, saved_bytes: float) -> float:
        """What the backward of a run of layers adds to it at most: all that they need is made at once.

        A block's other layers come after those that are made again, so that their memory is free by then.
        """
        again = self.again(num_layers)
        run = self.num_layers if self.method == "uniform" else min(1, again)
        return max(0, run - (num_layers - again)) * saved_bytes if again else 0.0
