"""An MLP of experts: a router sends each token to some of them; shared experts take every token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.model.parts.gated_mlp import mlp_params
from megatron_rl.model.parts.param_spec import CORRECTION, Constant, ParamSpec, whole
from megatron_rl.model.parts.part import FP32, Cut, LayerBlock, LayerPart
from megatron_rl.parallel.sharding import LogicalTensor, Segment


@dataclass(frozen=True)
class SharedExperts:
    """An MLP beside the experts that every token passes.

    block: its name in the experts' block. gate: the name there of a matrix of one row; its sigmoid scales a token's
    output; None: the output is not scaled. size_key: the config.json key of its columns. count_key: the key of the
    number of such MLPs that are fused into one; None: one.
    """

    block: str
    size_key: str
    gate: str | None = None
    count_key: str | None = None


@dataclass(frozen=True)
class Scoring:
    """How experts are chosen by scores in groups: the best experts of the best groups.

    function: "softmax" or "sigmoid", from logits to scores. best: the score of a group is the sum of its `best` largest
    scores. method: a config.json key and value; with another value all experts are one group; None: groups always
    apply. bias: a tensor of the experts' block that is added to scores for the choice alone and that no loss changes;
    None: there is no such tensor. scale, normalised: defaults of routed_scaling_factor and norm_topk_prob.
    """

    function: str
    best: int
    method: tuple[str, str] | None = None
    bias: str | None = None
    scale: float = 1.0
    normalised: bool = False


@dataclass(frozen=True)
class Experts:
    """How an architecture names its experts, in config.json and in its tensors.

    block: the part of a layer that has the router (`gate`) and the experts.
    gate, up, down: the three matrices of one expert, down(silu(gate(x)) * up(x)).
    count_keys: config.json keys of the number of experts; which one transformers writes depends on its version.
    size_key: the config.json key of one expert's columns.
    norm_topk_prob: whether the weights of a token's experts add up to 1; None: config.json says it, by default false.
    dense_keys: the config.json keys that say which layers have a dense MLP instead -> their defaults (`dense_layers`).
    shared: an MLP that every token passes beside its experts; None: the family has none.
    scoring: how experts are chosen; None: the largest values of a softmax over all experts.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    size_key: str = "moe_intermediate_size"
    norm_topk_prob: bool | None = None
    dense_keys: Mapping[str, object] = field(default_factory=dict, hash=False)
    shared: SharedExperts | None = None
    scoring: Scoring | None = None


@dataclass(frozen=True)
class ExpertsMLP(LayerPart):
    """Router, experts of `ffn` columns, and shared experts of `shared` columns together. Experts are used evenly.

    names: how the family names them.
    """

    recomputed_as = "moe"

    hidden: int
    ffn: int
    num_experts: int
    experts_per_token: int
    shared: int
    names: Experts

    def params(self, mega: str, hf: str) -> dict[str, ParamSpec]:
        """Router and experts; all experts of a rank are stacked in one tensor, as vLLM keeps them."""
        names, experts, hidden, ffn = self.names, self.num_experts, self.hidden, self.ffn
        block = f"{hf}{names.block}."
        stacked, single = f"{block}experts.routed_experts.", f"{block}experts.{{expert}}."
        gate_up = tuple(Segment(name, (experts, ffn, hidden), ffn) for name in ("gate", "up"))
        down = (Segment("columns", (experts, hidden, ffn), ffn),)
        params = {
            f"{mega}mlp.router.weight": whole(f"{block}gate.weight", (experts, hidden)),
            f"{mega}mlp.experts.w13": ParamSpec(
                LogicalTensor(f"{stacked}w13_weight", gate_up, tp_dim=1, is_expert=True),
                (f"{single}{names.gate}.weight", f"{single}{names.up}.weight"),
            ),
            f"{mega}mlp.experts.w2": ParamSpec(
                LogicalTensor(f"{stacked}w2_weight", down, tp_dim=2, is_expert=True), (f"{single}{names.down}.weight",)
            ),
        }
        if names.shared is not None and self.shared:
            shared = f"{mega}mlp.shared_experts."
            if names.shared.gate is not None:
                params[f"{shared}gate_weight"] = whole(f"{block}{names.shared.gate}.weight", (1, hidden))
            params |= mlp_params(hidden, self.shared, shared, f"{block}{names.shared.block}.")
        return params

    def constants(self, mega: str, hf: str) -> dict[str, Constant]:
        """The bias that is added to scores for the choice of experts."""
        if self.names.scoring is None or self.names.scoring.bias is None:
            return {}
        constant = Constant(f"{hf}{self.names.block}.{self.names.scoring.bias}", (self.num_experts,))
        return {f"{mega}mlp.router.{CORRECTION}": constant}

    @property
    def token_elements(self) -> int:
        return 3 * self.hidden * (self.ffn * max(self.experts_per_token, 1) + self.shared)

    def _routed(self, cut: Cut) -> float:
        """Tokens that a rank's experts get per token of the micro-batch."""
        return self.experts_per_token * cut.sequence_share * cut.expert_tp_size

    def kept_bytes(self, block: LayerBlock, cut: Cut) -> float:
        rows, own = block.tokens * self._routed(cut), block.tokens * cut.sequence_share
        ffn, shared = self.ffn // cut.expert_tp_size, self.shared // cut.tp_size
        router = own * self.num_experts * (FP32 + 1) + rows * (8 + 8 + FP32)
        has_gate = self.names.shared is not None and self.names.shared.gate is not None
        every = 3 * shared * block.tokens + has_gate * (self.hidden + 1) * own
        return (rows * (2 * self.hidden + 4 * ffn + 1) + every) * cut.element + router

    def widest_elements(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        rows, ffn = block.tokens * self._routed(cut), self.ffn // cut.expert_tp_size
        shared = self.shared // cut.tp_size * block.tokens
        # Until the experts have answered, what was sent, received and sorted stays, beside the answers, twice.
        answered = 0.0 if backward else rows * (5 * self.hidden + ffn)
        return max(rows * ffn * (4 + backward), answered, shared * (3 + backward))

    def columns(self, cut: Cut) -> float:
        return 3 * (self.ffn // cut.expert_tp_size) * self._routed(cut)

    def engine_elements(self, tp_size: int) -> int:
        return 3 * ((self.ffn * self.experts_per_token + self.shared) // tp_size)
