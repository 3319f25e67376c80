"""Which layers run their forward pass again for their backward pass, and what is kept then: arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.ledger.planner.activations import LayerBlock, LayerSizes

SELECTIVE = "selective"


@dataclass(frozen=True)
class Recompute:
    """One role's recomputed activations, as Megatron's transformer block reads the settings; None: none.

    method: uniform makes all layers of a chunk again, in runs of `num_layers`, block the first `num_layers` of it,
    one by one (Korthikanti et al., arXiv:2205.05198). parts: what of all layers is made again, where layers are not.
    """

    method: str | None = None
    num_layers: int = 0
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, megatron: MegatronConfig) -> Recompute:
        """Of a configuration that has passed preflight."""
        override = megatron.override_transformer_config
        if override.recompute_granularity is None:
            return cls()
        if override.recompute_granularity == SELECTIVE:
            return cls(parts=tuple(override.recompute_modules or ("core_attn",)))
        return cls(override.recompute_method, override.recompute_num_layers or 0)

    def again(self, num_layers: int) -> int:
        """Layers of a chunk of `num_layers` that run twice."""
        if self.method is None:
            return 0
        return num_layers if self.method == "uniform" else min(self.num_layers, num_layers)

    def share(self, chunks: Sequence[int]) -> float:
        """Share of all layers that run twice, in chunks of these sizes."""
        return sum(map(self.again, chunks)) / sum(chunks)

    def part_bytes(self, layer: LayerSizes, block: LayerBlock) -> list[float]:
        """Of what one layer would keep, what each part that is made again does not."""
        return [layer.part_bytes(block, part) for part in self.parts]

    def share_of_layer(self, layer: LayerSizes) -> float:
        """Of one layer's matrix products, the share that is made again as a part; core attention counts as none."""
        mlp = 3 * layer.ffn * (layer.routed or 1)
        attention = 2 * (layer.q + layer.kv)
        return mlp / (mlp + attention) if ("moe" if layer.routed else "mlp") in self.parts else 0.0

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
