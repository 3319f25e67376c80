"""What the supported Hugging Face architectures have in common and where they differ, as data.

A family is described once; import, export and the rollout binding all read the same map.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.errors import ConfigError

VOCAB_PADDING = 64
"""Rows of embedding and head are padded to a multiple of this, as vLLM does."""


@dataclass(frozen=True)
class ParamSpec:
    """One Megatron parameter in terms of Hugging Face tensors.

    A rank's shard is the concatenation along dim 0 of its 1/tp_size slice (along `tp_dim`) of each HF tensor;
    `tp_dim=None` means every TP rank holds the whole. `logical_name` is the rollout engine's name: two Megatron
    parameters with the same logical name (a tied head on the last pipeline stage) are copies of one tensor.
    """

    logical_name: str
    hf_names: tuple[str, ...]
    tp_dim: int | None
    padded_vocab: bool = False


@dataclass(frozen=True)
class Family:
    """What distinguishes one decoder-only architecture from the next."""

    architecture: str
    qkv_bias: bool


FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", qkv_bias=False),
        Family("Qwen2ForCausalLM", qkv_bias=True),
    )
}


def family_of(architectures: list[str] | None) -> Family:
    """The family of a HF config's `architectures`; raises ConfigError, listing the known ones, when there is none."""
    for name in architectures or []:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ConfigError(f"architecture {architectures} is not supported; known: {', '.join(sorted(FAMILIES))}")


def layer_params(family: Family, layer: int) -> dict[str, ParamSpec]:
    """Megatron name -> spec of one decoder layer, `layer` counted over the whole model."""
    mega, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."

    def qkv(kind: str) -> ParamSpec:
        sources = tuple(f"{hf}self_attn.{part}_proj.{kind}" for part in "qkv")
        return ParamSpec(f"{hf}self_attn.qkv_proj.{kind}", sources, tp_dim=0)

    def same(name: str, tp_dim: int | None) -> ParamSpec:
        return ParamSpec(hf + name, (hf + name,), tp_dim)

    gate_up = tuple(f"{hf}mlp.{part}_proj.weight" for part in ("gate", "up"))
    params = {
        f"{mega}input_layernorm.weight": same("input_layernorm.weight", None),
        f"{mega}self_attention.linear_qkv.weight": qkv("weight"),
        f"{mega}self_attention.linear_proj.weight": same("self_attn.o_proj.weight", 1),
        f"{mega}pre_mlp_layernorm.weight": same("post_attention_layernorm.weight", None),
        f"{mega}mlp.linear_fc1.weight": ParamSpec(f"{hf}mlp.gate_up_proj.weight", gate_up, tp_dim=0),
        f"{mega}mlp.linear_fc2.weight": same("mlp.down_proj.weight", 1),
    }
    if family.qkv_bias:
        params[f"{mega}self_attention.linear_qkv.bias"] = qkv("bias")
    return params


def param_map(family: Family, num_layers: int, tied: bool) -> dict[str, ParamSpec]:
    """Megatron name (layers counted over the whole model) -> spec, for every parameter of the language model."""
    embedding = ParamSpec("model.embed_tokens.weight", ("model.embed_tokens.weight",), 0, padded_vocab=True)
    head = embedding if tied else ParamSpec("lm_head.weight", ("lm_head.weight",), 0, padded_vocab=True)
    params = {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": ParamSpec("model.norm.weight", ("model.norm.weight",), None),
        "output_layer.weight": head,
    }
    for layer in range(num_layers):
        params |= layer_params(family, layer)
    return params


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding after padding; must be divisible by tp_size."""
    return -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING
