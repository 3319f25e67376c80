"""What adapters cost: their elements, and the bytes of activations that their products take in a layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.config.lora import LoraConfig
from megatron_rl.model.families import Model
from megatron_rl.model.families.adapter_params import LORA_A, adapter_specs
from megatron_rl.model.parts import Cut, LayerBlock, ParamSpec
from megatron_rl.parallel.stages import StagePlan


@dataclass(frozen=True)
class AdapterCosts:
    """The adapters of a model, in the mean layer and in its widest linear.

    whole, summed: rows of all A of linears that are cut by outputs, whose products every TP rank has for all tokens,
    and of those that are cut by inputs, whose products have the tokens between TP regions. routed: rows of all A of one
    expert, times the experts that a token is sent to. outputs, inputs: the most columns of one linear's adapted
    outputs, of both kinds.
    """

    whole: float
    summed: float
    routed: float
    outputs: int
    inputs: int

    @classmethod
    def of(cls, specs: Mapping[str, ParamSpec], stages: StagePlan, experts_per_token: int) -> AdapterCosts:
        """Count the A and B among the trained parameters; others have no such product."""
        num_layers = sum(map(sum, stages.chunk_sizes))
        routed = 0
        rows, columns = {0: 0, 1: 0}, {0: defaultdict[str, int](int), 1: defaultdict[str, int](int)}
        kinds: dict[str, int] = {}
        for name, spec in specs.items():
            linear, is_adapter, _ = name.partition(".adapters.")
            if not is_adapter:
                continue
            if spec.tensor.is_expert:
                routed += spec.tensor.segments[0].shape[1] * experts_per_token * name.endswith(LORA_A)
            elif name.endswith(LORA_A):
                kinds[linear] = 0 if spec.tensor.tp_dim is None else 1
                rows[kinds[linear]] += spec.tensor.segments[0].shape[0]
            else:
                columns[kinds[linear]][linear] += spec.tensor.segments[0].shape[0]
        widest = (max(columns[kind].values(), default=0) for kind in (0, 1))
        return cls(rows[0] / num_layers, rows[1] / num_layers, routed / num_layers, *widest)

    def kept_bytes(self, block: LayerBlock, cut: Cut) -> float:
        """Return the bytes that a layer keeps for backward: A's products. A's inputs are those of the linear, which the
        layer counts.
        """
        between = cut.sequence_share * (self.summed + self.routed * cut.expert_tp_size)
        return block.tokens * (self.whole + between) * cut.element

    def running_bytes(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        """Return the bytes that the widest linear holds for a moment: the sum of its output and the products. Experts
        run one after the other, and hold less.
        """
        widest = max(self.outputs / cut.tp_size, self.inputs * cut.sequence_share)
        return 0.0 if backward else block.tokens * widest * cut.element


def num_adapter_params(model: Model, lora: LoraConfig | None, *, active: bool = False) -> int:
    """Return the elements of all A and B, held rows of zeros included. active: of those that a token passes."""
    tensors = [spec.tensor for spec in adapter_specs(model.specs, lora).values()] if lora is not None else []
    routed = sum(tensor.numel for tensor in tensors if tensor.is_expert) if active else 0
    passed = routed * model.shape.experts_per_token // max(1, model.shape.num_experts)
    return sum(tensor.numel for tensor in tensors) - routed + passed
