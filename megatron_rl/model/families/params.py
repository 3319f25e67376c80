"""The map between Megatron's parameters, the rollout engine's and the tensors of a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_rl.model.families.attention_parts import LatentAttention
from megatron_rl.model.families.family import Experts, Family
from megatron_rl.model.families.shape import ModelShape
from megatron_rl.parallel.sharding import LogicalTensor, Segment

VOCAB_PADDING = 64
"""vLLM pads vocabularies to a multiple of this; it is also training's default."""

HEAD = "output_layer.weight"
"""Megatron's name of the weight of a vocabulary head and of a value head."""

CORRECTION = "correction_bias"
"""The router's name of the bias that is added to scores for the choice of experts alone."""


@dataclass(frozen=True)
class Constant:
    """A tensor of the folder that no update changes. vLLM has it under the same name, in float32."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ParamSpec:
    """One Megatron parameter: the logical tensor it is a shard of, and the Hugging Face tensor of each segment.

    Two Megatron parameters with the same tensor (a tied head on the last pipeline stage) are copies. The names of an
    expert tensor contain `{expert}` for the expert's number; each expert is one slice along dim 0.
    """

    tensor: LogicalTensor
    hf_names: tuple[str, ...]


def param_map(family: Family, shape: ModelShape) -> dict[str, ParamSpec]:
    """Megatron name (layers counted over the whole model) -> spec, for every parameter of the language model.

    In the order of the layers, the embedding first.
    """
    embedding = _vocab_matrix("model.embed_tokens.weight", shape)
    params = {"embedding.word_embeddings.weight": embedding}
    for layer in range(shape.num_layers):
        mega, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        params |= _norm_params(family, shape.hidden_size, mega, hf)
        if shape.latent is not None:
            params |= _latent_params(shape, shape.latent, f"{mega}self_attention.", f"{hf}self_attn.")
        else:
            params |= _attention_params(family, shape, mega, hf)
        if family.experts is None:
            params |= _mlp_params(shape.hidden_size, shape.ffn_size, f"{mega}mlp.", f"{hf}mlp.")
        elif layer in shape.dense_layers:
            params |= _mlp_params(shape.hidden_size, shape.dense_ffn_size, f"{mega}mlp.", f"{hf}mlp.")
        else:
            params |= _moe_params(family.experts, shape, mega, hf)
    return params | {
        "decoder.final_layernorm.weight": _whole("model.norm.weight", (shape.hidden_size,)),
        HEAD: embedding if shape.tied else _vocab_matrix("lm_head.weight", shape),
    }


def value_param_map(family: Family, shape: ModelShape) -> dict[str, ParamSpec]:
    """`param_map` of a value model: the trunk, and the one-label head of a reward model's folder."""
    trunk = param_map(family, replace(shape, tied=False))
    return trunk | {HEAD: _whole("score.weight", (1, shape.hidden_size))}


def constant_map(family: Family, shape: ModelShape) -> dict[str, Constant]:
    """Megatron name -> tensor that training reads and no update changes; {} in most families."""
    experts = family.experts
    if experts is None or experts.scoring is None or experts.scoring.bias is None:
        return {}
    return {
        f"decoder.layers.{layer}.mlp.router.{CORRECTION}": Constant(
            f"model.layers.{layer}.{experts.block}.{experts.scoring.bias}", (shape.num_experts,)
        )
        for layer in range(shape.num_layers)
        if layer not in shape.dense_layers
    }


def _norm_params(family: Family, hidden: int, mega: str, hf: str) -> dict[str, ParamSpec]:
    names = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    if family.style.norms_after:
        names |= {
            "self_attention.post_layernorm": "post_attention_layernorm",
            "pre_mlp_layernorm": "pre_feedforward_layernorm",
            "mlp.post_layernorm": "post_feedforward_layernorm",
        }
    return {f"{mega}{ours}.weight": _whole(f"{hf}{theirs}.weight", (hidden,)) for ours, theirs in names.items()}


def _latent_params(shape: ModelShape, latent: LatentAttention, mega: str, hf: str) -> dict[str, ParamSpec]:
    """Projections to latent vectors are whole on every TP rank, as in vLLM; projections from them are sharded."""
    hidden, heads = shape.hidden_size, shape.num_heads
    kv_a = Segment("kv_a", (latent.cached, hidden), 1)
    if latent.q_rank is None:
        params = {
            f"{mega}linear_down.weight": _single(f"{hf}kv_a_proj_with_mqa.weight", kv_a, 0),
            f"{mega}linear_q.weight": _heads(f"{hf}q_proj.weight", heads, latent.query, hidden),
        }
    else:
        both = (Segment("q_a", (latent.q_rank, hidden), 1), kv_a)
        names = (f"{hf}q_a_proj.weight", f"{hf}kv_a_proj_with_mqa.weight")
        params = {
            f"{mega}linear_down.weight": ParamSpec(LogicalTensor(f"{hf}fused_qkv_a_proj.weight", both, 0), names),
            f"{mega}q_layernorm.weight": _whole(f"{hf}q_a_layernorm.weight", (latent.q_rank,)),
            f"{mega}linear_q_up.weight": _heads(f"{hf}q_b_proj.weight", heads, latent.query, latent.q_rank),
        }
    o_proj = Segment("columns", (hidden, heads * latent.value), heads)
    return params | {
        f"{mega}kv_layernorm.weight": _whole(f"{hf}kv_a_layernorm.weight", (latent.kv_rank,)),
        f"{mega}linear_kv_up.weight": _heads(
            f"{hf}kv_b_proj.weight", heads, latent.nope + latent.value, latent.kv_rank
        ),
        f"{mega}linear_proj.weight": _single(f"{hf}o_proj.weight", o_proj, 1),
    }


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
        f"{mega}self_attention.linear_qkv.weight": qkv("weight", hidden),
        f"{mega}self_attention.linear_proj.weight": _single(f"{hf}self_attn.o_proj.weight", o_proj, 1),
    }
    if family.qkv_bias or shape.qkv_bias:
        params[f"{mega}self_attention.linear_qkv.bias"] = qkv("bias")
    if family.qk_norm or shape.qk_norm:
        for part in "qk":
            name = f"{mega}self_attention.{part}_layernorm.weight"
            params[name] = _whole(f"{hf}self_attn.{part}_norm.weight", (size,))
    return params


def _mlp_params(hidden: int, ffn: int, mega: str, hf: str) -> dict[str, ParamSpec]:
    gate_up = tuple(Segment(name, (ffn, hidden), ffn) for name in ("gate", "up"))
    names = tuple(f"{hf}{part.name}_proj.weight" for part in gate_up)
    down = Segment("columns", (hidden, ffn), ffn)
    return {
        f"{mega}linear_fc1.weight": ParamSpec(LogicalTensor(f"{hf}gate_up_proj.weight", gate_up, 0), names),
        f"{mega}linear_fc2.weight": _single(f"{hf}down_proj.weight", down, 1),
    }


def _moe_params(names: Experts, shape: ModelShape, mega: str, hf: str) -> dict[str, ParamSpec]:
    """Router and experts; all experts of a rank are stacked in one tensor, as vLLM keeps them."""
    experts, hidden, ffn = shape.num_experts, shape.hidden_size, shape.ffn_size
    block = f"{hf}{names.block}."
    stacked, single = f"{block}experts.routed_experts.", f"{block}experts.{{expert}}."
    gate_up = tuple(Segment(name, (experts, ffn, hidden), ffn) for name in ("gate", "up"))
    down = (Segment("columns", (experts, hidden, ffn), ffn),)
    params = {
        f"{mega}mlp.router.weight": _whole(f"{block}gate.weight", (experts, hidden)),
        f"{mega}mlp.experts.w13": ParamSpec(
            LogicalTensor(f"{stacked}w13_weight", gate_up, tp_dim=1, is_expert=True),
            (f"{single}{names.gate}.weight", f"{single}{names.up}.weight"),
        ),
        f"{mega}mlp.experts.w2": ParamSpec(
            LogicalTensor(f"{stacked}w2_weight", down, tp_dim=2, is_expert=True), (f"{single}{names.down}.weight",)
        ),
    }
    if names.shared is not None and shape.shared_size:
        shared = f"{mega}mlp.shared_experts."
        if names.shared.gate is not None:
            params[f"{shared}gate_weight"] = _whole(f"{block}{names.shared.gate}.weight", (1, hidden))
        params |= _mlp_params(hidden, shape.shared_size, shared, f"{block}{names.shared.block}.")
    return params


def _single(name: str, segment: Segment, tp_dim: int) -> ParamSpec:
    """A tensor of one segment, under the same name in Hugging Face and the rollout engine."""
    return ParamSpec(LogicalTensor(name, (segment,), tp_dim), (name,))


def _heads(name: str, heads: int, size: int, columns: int) -> ParamSpec:
    """A matrix with `size` rows for each head."""
    return _single(name, Segment("heads", (heads * size, columns), heads), 0)


def _whole(name: str, shape: tuple[int, ...]) -> ParamSpec:
    """A tensor that every TP rank holds whole."""
    return ParamSpec(LogicalTensor(name, (Segment("all", shape, 1),), None), (name,))


def _vocab_matrix(name: str, shape: ModelShape) -> ParamSpec:
    rows = Segment("rows", (shape.vocab_size, shape.hidden_size), shape.vocab_size)
    return ParamSpec(LogicalTensor(name, (rows,), tp_dim=0, is_vocab=True), (name,))
