"""Activations of a pipeline stage: bytes kept for backward, bytes held for a moment, and recomputation.

Each part of a layer states its own (`model/parts`), as `model/gpt.py` builds it: own rotary embeddings and gates, no
dropout, flash attention. Which tensors autograd keeps was read off real layers, and a test compares the two.
Tokens are those of one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.model.parts import Cut, Layer, LayerBlock

CHUNKS_FORWARD, CHUNKS_BACKWARD = 2, 4
"""Number of tensors of the size of a float32 chunk of logits that the head's forward and backward hold."""


@dataclass(frozen=True)
class MeanLayer:
    """One layer that stands for all layers of a model on a rank: the mean of what they keep, the most that one holds.

    kinds: (kind of layer, how many there are), each kind once.
    """

    kinds: tuple[tuple[Layer, int], ...]
    cut: Cut

    @property
    def hidden(self) -> int:
        return self.kinds[0][0].hidden

    @property
    def element(self) -> int:
        return self.cut.element

    def _mean(self, cost: Callable[[Layer], float]) -> float:
        if len(self.kinds) == 1:
            return cost(self.kinds[0][0])
        return sum(number * cost(layer) for layer, number in self.kinds) / sum(number for _, number in self.kinds)

    def saved_bytes(self, block: LayerBlock) -> float:
        """Return the bytes that one layer keeps between forward and backward."""
        return self._mean(lambda layer: layer.kept_bytes(block, self.cut))

    def input_bytes(self, block: LayerBlock) -> float:
        """Return the bytes of a layer's input, which is all that full recomputation keeps of it."""
        return block.tokens * self.cut.sequence_share * self.hidden * self.element

    def part_bytes(self, block: LayerBlock, module: str) -> float:
        """Return how many of `saved_bytes` are not kept where a module is recomputed: core_attn, mlp or moe."""
        return self._mean(lambda layer: layer.again_bytes(block, self.cut, module))

    def transient_bytes(self, block: LayerBlock, *, backward: bool, way: str = "a2a") -> float:
        """Return the bytes that a running layer holds for a moment. way: `cp_comm_type`."""
        return max(self._running_bytes(layer, block, way, backward=backward) for layer, _ in self.kinds)

    def backward_bytes(self, block: LayerBlock, way: str, chunk: Sequence[Layer], recompute: Recompute) -> float:
        """Return the most that the backward of a chunk's layers, its last one first, adds to what all of them keep: a
        layer adds what it holds for a moment, and those after it have freed what they kept. way: `cp_comm_type`.
        """
        added, freed, kinds = [], 0.0, dict.fromkeys(chunk)
        for number, layer in reversed(list(enumerate(chunk))):
            if layer in kinds:  # one before it of the same kind adds less
                del kinds[layer]
                added.append(self._running_bytes(layer, block, way, backward=True) - freed)
            if not kinds:
                break
            if number >= recompute.again(len(chunk)):
                again = sum(layer.again_bytes(block, self.cut, part) for part in recompute.parts)
                freed += layer.kept_bytes(block, self.cut) - again
        return max(added)

    def _running_bytes(self, layer: Layer, block: LayerBlock, way: str, *, backward: bool) -> float:
        num_exchanged = 0
        if block.num_sharing > 1 and way != "a2a":
            num_exchanged = 2 if way == "p2p" else block.num_sharing
        return layer.running_bytes(block, self.cut, backward=backward, num_exchanged=num_exchanged)

    def share_again(self, modules: tuple[str, ...]) -> float:
        """Return the share of a layer's matrix products in recomputed modules."""
        return self._mean(lambda layer: layer.share_again(self.cut, modules))


def in_flight(pp_size: int, pp_rank: int, vpp_size: int, num_micro_batches: int) -> int:
    """Return the most chunk passes whose activations a stage keeps: one-forward-one-backward (Narayanan et al.,
    arXiv:2104.04473), interleaved with several chunks.
    """
    total = num_micro_batches * vpp_size
    if vpp_size == 1:
        return min(pp_size - pp_rank, total)
    if num_micro_batches == pp_size:
        return total  # Megatron runs all forward passes first
    return min(2 * (pp_size - pp_rank - 1) + (vpp_size - 1) * pp_size + 1, total)


SELECTIVE = "selective"


@dataclass(frozen=True)
class Recompute:
    """One role's recomputed activations, as Megatron's transformer block reads the settings.

    method: uniform recomputes all layers of a chunk in groups of `num_layers`; block recomputes its first `num_layers`,
    one by one (Korthikanti et al., arXiv:2205.05198); None: no whole layers. parts: recomputed parts of all layers.
    """

    method: str | None = None
    num_layers: int = 0
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, megatron: MegatronConfig) -> Recompute:
        """Read a configuration that has passed preflight."""
        override = megatron.override_transformer_config
        if override.recompute_granularity is None:
            return cls()
        if override.recompute_granularity == SELECTIVE:
            return cls(parts=tuple(override.recompute_modules or ("core_attn",)))
        return cls(override.recompute_method, override.recompute_num_layers or 0)

    def again(self, num_layers: int) -> int:
        """Return how many layers of a chunk of `num_layers` run twice."""
        if self.method is None:
            return 0
        return num_layers if self.method == "uniform" else min(self.num_layers, num_layers)

    def share(self, chunks: Sequence[int]) -> float:
        """Return the share of all layers that run twice, in chunks of these sizes."""
        return sum(map(self.again, chunks)) / sum(chunks)

    def part_bytes(self, layer: MeanLayer, block: LayerBlock) -> list[float]:
        """Return the bytes of one layer that each recomputed part does not keep."""
        return [layer.part_bytes(block, part) for part in self.parts]

    def kept_bytes(self, num_layers: int, input_bytes: float, saved_bytes: float) -> float:
        """Return the bytes that a pass through a chunk keeps between forward and backward.

        input_bytes, saved_bytes: of one layer, its input alone and all that its backward needs.
        """
        again = self.again(num_layers)
        run = self.num_layers if self.method == "uniform" else 1
        return again / run * input_bytes + (num_layers - again) * saved_bytes

    def made_bytes(self, num_layers: int, saved_bytes: float) -> float:
        """Return the most bytes that recomputing a group of layers for its backward adds.

        With method block the layers that are not recomputed run their backward first, so their memory is free by then.
        """
        again = self.again(num_layers)
        run = self.num_layers if self.method == "uniform" else min(1, again)
        return max(0, run - (num_layers - again)) * saved_bytes if again else 0.0
