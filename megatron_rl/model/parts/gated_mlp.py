"""The gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.model.parts.param_spec import ParamSpec, single
from megatron_rl.model.parts.part import Cut, LayerBlock, LayerPart
from megatron_rl.parallel.sharding import LogicalTensor, Segment


@dataclass(frozen=True)
class GatedMLP(LayerPart):
    """down(act(gate(x)) * up(x)), with `ffn` columns in the middle."""

    recomputed_as = "mlp"

    hidden: int
    ffn: int

    def params(self, mega: str, hf: str) -> dict[str, ParamSpec]:
        return mlp_params(self.hidden, self.ffn, f"{mega}mlp.", f"{hf}mlp.")

    @property
    def token_elements(self) -> int:
        return 3 * self.hidden * self.ffn

    def kept_bytes(self, block: LayerBlock, cut: Cut) -> float:
        return 3 * (self.ffn // cut.tp_size) * block.tokens * cut.element

    def widest_elements(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        # Our own gate makes one tensor less than that of experts.
        return self.ffn // cut.tp_size * block.tokens * 3

    def columns(self, cut: Cut) -> float:
        return 3 * (self.ffn // cut.tp_size)

    def engine_elements(self, tp_size: int) -> int:
        return 3 * (self.ffn // tp_size)


def mlp_params(hidden: int, ffn: int, mega: str, hf: str) -> dict[str, ParamSpec]:
    """The two matrices of a gated MLP; gate and up are stacked, as vLLM has them. mega, hf: prefixes of the MLP."""
    gate_up = tuple(Segment(name, (ffn, hidden), ffn) for name in ("gate", "up"))
    names = tuple(f"{hf}{part.name}_proj.weight" for part in gate_up)
    down = Segment("columns", (hidden, ffn), ffn)
    return {
        f"{mega}linear_fc1.weight": ParamSpec(LogicalTensor(f"{hf}gate_up_proj.weight", gate_up, 0), names),
        f"{mega}linear_fc2.weight": single(f"{hf}down_proj.weight", down, 1),
    }
