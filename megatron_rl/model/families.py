"""What the supported Hugging Face architectures have in common and where they differ, as data.

A family is described once; import, export and the rollout binding all read the same map.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.errors import ConfigError
from megatron_rl.parallel.sharding import LogicalTensor, Segment

VOCAB_PADDING = 64
"""vLLM pads vocabularies to a multiple of this; training does the same unless it is told otherwise."""


@dataclass(frozen=True)
class Family:
    """What distinguishes one decoder-only architecture from the next.

    qkv_bias: q, k and v projections have biases. qk_norm: queries and keys are normalised per head.
    is_moe: every MLP is a router over experts.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    is_moe: bool = False


FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM"),
        Family("Qwen2ForCausalLM", qkv_bias=True),
        Family("Qwen3ForCausalLM", qk_norm=True),
        Family("Qwen3MoeForCausalLM", qk_norm=True, is_moe=True),
    )
}


def family_of(architectures: list[str] | None) -> Family:
    """The family of a HF config's `architectures`; raises ConfigError, listing the known ones, when there is none."""
    for name in architectures or []:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ConfigError(f"architecture {architectures} is not supported; known: {', '.join(sorted(FAMILIES))}")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one model. `ffn_size` is that of the dense MLP, or of one expert; `num_experts` is 0 when dense."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    tied: bool
    num_experts: int = 0

    @classmethod
    def from_hf(cls, settings: dict) -> ModelShape:
        """From the content of a config.json, as a plain dict."""
        heads, is_moe = settings["num_attention_heads"], family_of(settings["architectures"]).is_moe
        return cls(
            num_layers=settings["num_hidden_layers"],
            hidden_size=settings["hidden_size"],
            num_heads=heads,
            num_kv_heads=settings.get("num_key_value_heads") or heads,
            head_size=settings.get("head_dim") or settings["hidden_size"] // heads,
            ffn_size=settings["moe_intermediate_size"] if is_moe else settings["intermediate_size"],
            vocab_size=settings["vocab_size"],
            tied=settings["tie_word_embeddings"],
            num_experts=(settings.get("num_local_experts") or settings["num_experts"]) if is_moe else 0,
        )


@dataclass(frozen=True)
class ParamSpec:
    """One Megatron parameter: the logical tensor it is a shard of, and the Hugging Face tensor of each segment.

    Two Megatron parameters with the same tensor (a tied head on the last pipeline stage) are copies. The names of an
    expert tensor hold `{expert}` for the expert's number; each is one slice along dim 0.
    """

    tensor: LogicalTensor
    hf_names: tuple[str, ...]


def param_map(family: Family, shape: ModelShape) -> dict[str, ParamSpec]:
    """Megatron name (layers counted over the whole model) -> spec, for every parameter of the language model."""
    embedding = _vocab_matrix("model.embed_tokens.weight", shape)
    params = {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": whole("model.norm.weight", (shape.hidden_size,)),
        "output_layer.weight": embedding if shape.tied else _vocab_matrix("lm_head.weight", shape),
    }
    for layer in range(shape.num_layers):
        mega, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        params |= _attention_params(family, shape, mega, hf)
        params |= _expert_params(shape, mega, hf) if family.is_moe else _mlp_params(shape, mega, hf)
    return params


def _attention_params(family: Family, shape: ModelShape, mega: str, hf: str) -> dict[str, ParamSpec]:
    hidden, heads, kv_heads, size = shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_size

    def qkv(kind: str, *columns: int) -> ParamSpec:
        parts = tuple(
            Segment(name, (num * size, *columns), num) for name, num in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        names = tuple(f"{hf}self_attn.{part.name}_proj.{kind}" for part in parts)
        return ParamSpec(LogicalTensor(f"{hf}self_attn.qkv_proj.{kind}", parts, tp_dim=0), names)

    o_proj = Segment("columns", (hidden, heads * size), heads)
    params = {
        f"{mega}input_layernorm.weight": whole(f"{hf}input_layernorm.weight", (hidden,)),
        f"{mega}self_attention.linear_qkv.weight": qkv("weight", hidden),
        f"{mega}self_attention.linear_proj.weight": _single(f"{hf}self_attn.o_proj.weight", o_proj, 1),
        f"{mega}pre_mlp_layernorm.weight": whole(f"{hf}post_attention_layernorm.weight", (hidden,)),
    }
    if family.qkv_bias:
        params[f"{mega}self_attention.linear_qkv.bias"] = qkv("bias")
    if family.qk_norm:
        for part in "qk":
            name = f"{mega}self_attention.{part}_layernorm.weight"
            params[name] = whole(f"{hf}self_attn.{part}_norm.weight", (size,))
    return params


def _mlp_params(shape: ModelShape, mega: str, hf: str) -> dict[str, ParamSpec]:
    hidden, ffn = shape.hidden_size, shape.ffn_size
    gate_up = tuple(Segment(name, (ffn, hidden), ffn) for name in ("gate", "up"))
    names = tuple(f"{hf}mlp.{part.name}_proj.weight" for part in gate_up)
    down = Segment("columns", (hidden, ffn), ffn)
    return {
        f"{mega}mlp.linear_fc1.weight": ParamSpec(LogicalTensor(f"{hf}mlp.gate_up_proj.weight", gate_up, 0), names),
        f"{mega}mlp.linear_fc2.weight": _single(f"{hf}mlp.down_proj.weight", down, 1),
    }


def _expert_params(shape: ModelShape, mega: str, hf: str) -> dict[str, ParamSpec]:
    """Router and experts; all experts of a rank are stacked in one tensor, as vLLM keeps them."""
    experts, hidden, ffn = shape.num_experts, shape.hidden_size, shape.ffn_size
    stacked, single = f"{hf}mlp.experts.routed_experts.", f"{hf}mlp.experts.{{expert}}."
    gate_up = tuple(Segment(name, (experts, ffn, hidden), ffn) for name in ("gate", "up"))
    down = (Segment("columns", (experts, hidden, ffn), ffn),)
    return {
        f"{mega}mlp.router.weight": whole(f"{hf}mlp.gate.weight", (experts, hidden)),
        f"{mega}mlp.experts.w13": ParamSpec(
            LogicalTensor(f"{stacked}w13_weight", gate_up, tp_dim=1, is_expert=True),
            tuple(f"{single}{part.name}_proj.weight" for part in gate_up),
        ),
        f"{mega}mlp.experts.w2": ParamSpec(
            LogicalTensor(f"{stacked}w2_weight", down, tp_dim=2, is_expert=True), (f"{single}down_proj.weight",)
        ),
    }


def _single(name: str, segment: Segment, tp_dim: int) -> ParamSpec:
    """A tensor of one segment, under the same name in Hugging Face and the rollout engine."""
    return ParamSpec(LogicalTensor(name, (segment,), tp_dim), (name,))


def whole(name: str, shape: tuple[int, ...]) -> ParamSpec:
    """A tensor that every TP rank holds whole."""
    return ParamSpec(LogicalTensor(name, (Segment("all", shape, 1),), None), (name,))


def _vocab_matrix(name: str, shape: ModelShape) -> ParamSpec:
    rows = Segment("rows", (shape.vocab_size, shape.hidden_size), shape.vocab_size)
    return ParamSpec(LogicalTensor(name, (rows,), tp_dim=0, is_vocab=True), (name,))
