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
    """An MLP next to the experts that every token passes.

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
class ExpertStacks:
    """Experts that a folder has in stacks of all, with biases: [E, H, 2F] and [E, F, H], inputs before outputs.

    Columns of gate and up take turns. gate_up, down: names in the experts' block; bias: what follows them in the names
    of the biases, [E, 2F] and [E, H].
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    bias: str = "_bias"


@dataclass(frozen=True)
class Experts:
    """How an architecture names its experts, in config.json and in its tensors.

    block: the part of a layer that has the router and the experts. router: its name there; router_bias: its logits have
    a bias.
    gate, up, down: the three matrices of one expert, down(silu(gate(x)) * up(x)). gate_up: the first two, if joined.
    count_keys: config.json keys of the number of experts; which one transformers writes depends on its version.
    size_key: the config.json key of one expert's columns.
    norm_topk_prob: whether the weights of a token's experts add up to 1; None: config.json says it, by default false.
    dense_keys: the config.json keys that say which layers have a dense MLP instead -> their defaults (`dense_layers`).
    shared: an MLP that every token passes next to its experts; None: the family has none.
    scoring: how experts are chosen; None: the largest values of a softmax over all experts.
    stacks: all experts are in stacks, with biases and bounded gates (`model/biased_experts.py`); None: they are not.
    joined: a folder has the experts of a layer in two transposed stacks, gates before ups; else one by one.
    """

    block: str = "mlp"
    router: str = "gate"
    router_bias: bool = False
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    size_key: str = "moe_intermediate_size"
    norm_topk_prob: bool | None = None
    dense_keys: Mapping[str, object] = field(default_factory=dict, hash=False)
    shared: SharedExperts | None = None
    scoring: Scoring | None = None
    stacks: ExpertStacks | None = None
    joined: bool = False


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
        names, hidden = self.names, self.hidden
        block = f"{hf}{names.block}."
        router = f"{block}{names.router}"
        params = {f"{mega}mlp.router.weight": whole(f"{router}.weight", (self.num_experts, hidden))}
        if names.router_bias:
            params[f"{mega}mlp.router.bias"] = whole(f"{router}.bias", (self.num_experts,))
        experts = self._single(block) if names.stacks is None else self._stacked(block, names.stacks)
        params |= {f"{mega}mlp.experts.{name}": spec for name, spec in experts.items()}
        if names.shared is not None and self.shared:
            shared = f"{mega}mlp.shared_experts."
            if names.shared.gate is not None:
                params[f"{shared}gate_weight"] = whole(f"{block}{names.shared.gate}.weight", (1, hidden))
            params |= mlp_params(hidden, self.shared, shared, f"{block}{names.shared.block}.")
        return params

    def _single(self, block: str) -> dict[str, ParamSpec]:
        """The stacks of experts, which the folder has one by one or joined. block: prefix of the experts' block."""
        names, experts, hidden, ffn = self.names, self.num_experts, self.hidden, self.ffn
        stacked, single = f"{block}experts.routed_experts.", f"{block}experts.{{expert}}."
        gate_up = tuple(Segment(name, (experts, ffn, hidden), ffn) for name in ("gate", "up"))
        down = (Segment("columns", (experts, hidden, ffn), ffn),)
        w13 = LogicalTensor(f"{stacked}w13_weight", gate_up, tp_dim=1, is_expert=True)
        w2 = LogicalTensor(f"{stacked}w2_weight", down, tp_dim=2, is_expert=True)
        if names.joined:
            both, last = f"{block}experts.{names.gate_up}", f"{block}experts.{names.down}"
            return {"w13": ParamSpec(w13, (both, both), transposed=True), "w2": ParamSpec(w2, (last,), transposed=True)}
        gate, up, last = (f"{single}{name}.weight" for name in (names.gate, names.up, names.down))
        return {"w13": ParamSpec(w13, (gate, up)), "w2": ParamSpec(w2, (last,))}

    def _stacked(self, block: str, stacks: ExpertStacks) -> dict[str, ParamSpec]:
        """Stacks with biases. Gate and up take turns in rows, so a cut of pairs of rows is one interval."""
        experts, hidden, ffn = self.num_experts, self.hidden, self.ffn

        def stack(kind: str, segment: Segment, tp_dim: int | None, name: str, **options: bool) -> ParamSpec:
            named = f"{block}experts.routed_experts.{kind}"
            first_only = options.pop("first_only", False)
            tensor = LogicalTensor(named, (segment,), tp_dim, is_expert=True, is_first_only=first_only)
            return ParamSpec(tensor, (f"{block}{name}",), **options)

        gate_up, down = Segment("gate_up", (experts, 2 * ffn, hidden), ffn), (experts, hidden, ffn)
        return {
            "w13": stack("w13_weight", gate_up, 1, stacks.gate_up, transposed=True),
            "w13_bias": stack(
                "w13_bias", Segment("gate_up", (experts, 2 * ffn), ffn), 1, f"{stacks.gate_up}{stacks.bias}"
            ),
            "w2": stack("w2_weight", Segment("columns", down, ffn), 2, stacks.down, transposed=True),
            # Ranks add partial sums, and the bias must be in one of them.
            "w2_bias": stack(
                "w2_bias",
                Segment("all", (experts, hidden), 1),
                None,
                f"{stacks.down}{stacks.bias}",
                first_only=True,
            ),
        }

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
        kept = 4 if self.names.stacks is None else 3  # a bounded gate computes itself again
        return (rows * (2 * self.hidden + kept * ffn + 1) + every) * cut.element + router

    def widest_elements(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        rows, ffn = block.tokens * self._routed(cut), self.ffn // cut.expert_tp_size
        shared = self.shared // cut.tp_size * block.tokens
        # Rows that another rank sends, and those that are sorted by expert, are tensors of their own.
        copies = (cut.ep_size * cut.expert_tp_size > 1) + (self.num_experts > cut.ep_size)
        # Until the experts have answered, what was sent, received and sorted stays, next to the responses, twice. In
        # backward so do gradients of responses, until they are weighted; what was sorted is counted as kept.
        answered = rows * (2 + copies) * self.hidden
        if not backward:
            own = block.tokens * cut.sequence_share * self.hidden  # the block's input, and what shared experts answer
            answered += rows * (self.hidden + ffn) + own * (1 + (self.shared > 0))
        gated = rows * ffn * (4 + backward)
        if self.names.stacks is not None and cut.element != FP32:  # all experts at once, as on GPUs
            # Forward: a product, the biases of its rows, and their sum. Backward: nine tensors of a bounded gate, when
            # the gate's and the experts' outputs are gone.
            gated = rows * (8 * ffn - self.hidden if backward else (1 + copies) * self.hidden + 6 * ffn)
        return max(gated, answered, shared * (3 + backward))

    def columns(self, cut: Cut) -> float:
        return 3 * (self.ffn // cut.expert_tp_size) * self._routed(cut)

    def engine_elements(self, tp_size: int) -> int:
        inside = 3 * ((self.ffn * self.experts_per_token + self.shared) // tp_size)
        # Outputs of routed and of shared experts are summed over ranks one by one, and then added: seven tensors of
        # hidden states, of which a layer has four anyway.
        return max(inside, 3 * self.hidden) if self.shared and tp_size > 1 else inside
