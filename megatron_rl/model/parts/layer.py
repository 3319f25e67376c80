"""A decoder layer: attention and an MLP around the residual stream, with norms."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.model.parts.expert_mlp import ExpertsMLP
from megatron_rl.model.parts.param_spec import Constant, ParamSpec, whole
from megatron_rl.model.parts.part import FP32, AttentionPart, Cut, LayerBlock, LayerPart

SCALE = "layer_scalar"
"""A layer's name of the number by which its output is multiplied."""


@dataclass(frozen=True)
class Layer:
    """One layer. norms_after: outputs of attention and MLP are normalised before they are added. is_scaled: its output
    is multiplied by a number that no update changes.

    Two layers are of one kind if they are equal.
    """

    hidden: int
    attention: AttentionPart
    mlp: LayerPart
    norms_after: bool = False
    is_scaled: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether tokens are routed to experts."""
        return isinstance(self.mlp, ExpertsMLP)

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        return (self.attention, self.mlp)

    def params(self, mega: str, hf: str) -> dict[str, ParamSpec]:
        """Megatron name -> spec, in the order of Megatron's modules, in which DDP lays them. mega, hf: prefixes of the
        layer's names.
        """

        def norm(ours: str, theirs: str) -> dict[str, ParamSpec]:
            return {f"{mega}{ours}.weight": whole(f"{hf}{theirs}.weight", (self.hidden,))}

        attention, mlp, before_mlp = (
            self.attention.params(mega, hf),
            self.mlp.params(mega, hf),
            "post_attention_layernorm",
        )
        if self.norms_after:
            attention |= norm("self_attention.post_layernorm", "post_attention_layernorm")
            mlp |= norm("mlp.post_layernorm", "post_feedforward_layernorm")
            before_mlp = "pre_feedforward_layernorm"
        return norm("input_layernorm", "input_layernorm") | attention | norm("pre_mlp_layernorm", before_mlp) | mlp

    def constants(self, mega: str, hf: str) -> dict[str, Constant]:
        """Megatron name -> tensor that no update changes."""
        scales = {f"{mega}{SCALE}": Constant(f"{hf}{SCALE}", (1,))} if self.is_scaled else {}
        return self.attention.constants(mega, hf) | self.mlp.constants(mega, hf) | scales

    def kept_bytes(self, block: LayerBlock, cut: Cut) -> float:
        """Bytes that the layer keeps between forward and backward."""
        # A norm after attention or MLP keeps its input.
        norms = 2 if self.norms_after else 0
        own = block.tokens * cut.sequence_share
        residual = own * ((4 + norms) * self.hidden * cut.element + (2 + norms) * FP32)
        return residual + sum(part.kept_bytes(block, cut) for part in self.parts)

    def again_bytes(self, block: LayerBlock, cut: Cut, module: str) -> float:
        """How many of `kept_bytes` are not kept where `module` of `recompute_modules` is recomputed."""
        return sum(part.again_bytes(block, cut, module) for part in self.parts)

    def running_bytes(self, block: LayerBlock, cut: Cut, *, backward: bool, num_exchanged: int = 0) -> float:
        """Bytes that the running layer holds for a moment: the widest step of its parts, which run one after the other.

        num_exchanged: context-parallel ranks whose keys are there while attention reads them; 0: none.
        """
        attention, mlp = (
            part.widest_elements(block, cut, backward=backward) * cut.element
            + part.products_bytes(block, cut, backward=backward)
            for part in self.parts
        )
        if num_exchanged:
            attention += self.attention.exchanged_bytes(block, cut, num_exchanged, backward=backward)
        if backward:
            # What the MLP kept is gone when attention's backward runs.
            attention -= self.mlp.kept_bytes(block, cut)
        return max(attention, mlp) + 2 * self.hidden * block.tokens * cut.element

    def share_again(self, cut: Cut, modules: tuple[str, ...]) -> float:
        """Share of the layer's matrix products in recomputed modules; core attention counts as none."""
        columns = {part.recomputed_as: part.columns(cut) for part in self.parts}
        return columns[self.mlp.recomputed_as] / sum(columns.values()) if self.mlp.recomputed_as in modules else 0.0

    @property
    def token_elements(self) -> int:
        """Elements of the matrices that one token passes, over all ranks."""
        return sum(part.token_elements for part in self.parts)
