"""What distinguishes one decoder-only architecture from the next."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.model.families.attention_parts import AttentionKeys

WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Where a word begins in a name such as Qwen2Moe."""

FIXED_SETTINGS = {
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "use_bidirectional_attention": False,
}
"""config.json settings that may have one value only (or be absent), unless a family says otherwise."""


@dataclass(frozen=True)
class Style:
    """How the parts of a layer are put together.

    activation: of the gated MLP, by config.json's name. zero_centred_norms: a norm's weight w stands for 1 + w.
    norms_after: what attention and MLP give is normalised once more before it is added. scaled_embedding: embeddings
    are multiplied by the square root of the hidden size. head_cap: the config.json key of a bound c, as c tanh(x / c),
    on logits; None: there is none.
    """

    activation: str = "silu"
    zero_centred_norms: bool = False
    norms_after: bool = False
    scaled_embedding: bool = False
    head_cap: str | None = None

    @property
    def fixed(self) -> dict[str, object]:
        """config.json settings that may have one value only, because of the style."""
        return {
            "hidden_act": self.activation,
            "hidden_activation": self.activation,
            "use_bidirectional_attention": False,
        }


LISTED, STEP, FIRST = "mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace"
STEP_RULE = {LISTED: (), STEP: 1}
"""Qwen's keys: layers by number, and experts in every n-th layer only. Absent: experts are everywhere."""


def first_rule(absent: int) -> dict[str, object]:
    """DeepSeek's key: how many of the first layers are dense. absent: how many where config.json does not say."""
    return {FIRST: absent}


@dataclass(frozen=True)
class SharedExperts:
    """An MLP beside the experts that every token passes.

    block: its part of the experts' block. gate: the part of the block whose one row, by its sigmoid, scales a token's
    output; None: nothing does. size_key: the config.json key of its columns. count_key: the key of how many such MLPs
    lie side by side as one; None: one.
    """

    block: str
    size_key: str
    gate: str | None = None
    count_key: str | None = None


@dataclass(frozen=True)
class Scoring:
    """How experts are chosen by scores in groups: those of the best groups alone, and of them the best.

    function: "softmax" or "sigmoid", which makes scores of logits. best: so many of a group's experts, by the sum of
    their scores, stand for it. method: a config.json key and the value without which all experts are one group; None:
    groups are always in force. bias: a tensor of the experts' block that is added to scores for the choice alone, and
    that training leaves as it is; None: there is none. scale, normalised: routed_scaling_factor and norm_topk_prob
    where config.json has none.
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

    block: the part of a layer that holds the router (`gate`) and the experts.
    gate, up, down: the three matrices of one expert, down(silu(gate(x)) * up(x)).
    count_keys: config.json keys of the number of experts; transformers writes one or another, by its version.
    size_key: the config.json key of one expert's columns.
    norm_topk_prob: whether the weights of a token's experts add up to 1; None: config.json says, and false if it
    does not.
    dense_keys: the config.json keys that say which layers have a dense MLP instead, each with what its absence means
    (`dense_layers`).
    shared: an MLP that every token passes beside its experts; None: there is none.
    scoring: how experts are chosen; None: the largest of a softmax over all.
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
class Window:
    """How config.json asks for attention to the last `sliding_window` positions only.

    switch: a setting that must be true for the window to be in force; None: it always is.
    default: the window where `sliding_window` is absent; an explicit null is none.
    """

    switch: str | None = None
    default: int | None = None


@dataclass(frozen=True)
class Family:
    """One architecture, under its names in config.json.

    architecture: the language model. reward_architecture: the same trunk with a classification head, `score.weight`.
    qkv_bias: q, k and v projections have biases. qk_norm: queries and keys are normalised per head. qkv_bias_key,
    qk_norm_key: the config.json key that says so, where it is not always so.
    attention: how attention differs from the usual. style: how the parts of a layer are put together.
    latent_attention: keys and values are made of a short latent vector (`LatentAttention`).
    experts: MLPs are routers over experts, in all layers or those that config.json names; None: all are dense.
    window: sliding-window attention that config.json may ask for; None: the architecture has none.
    fixed: further config.json settings that may have one value only (or be absent).
    defaults: what it means that config.json leaves a setting out, where that is not what it means elsewhere.
    rollout: settings that vLLM reads from config.json and that transformers takes for granted.
    ahead_key: the config.json key of how many layers that predict several tokens a folder may have behind the others,
    which nobody reads; None: it may have none. own_type: the model_type of config.json, where it is not the
    architecture's name in small letters.
    """

    architecture: str
    reward_architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    qkv_bias_key: str | None = None
    qk_norm_key: str | None = None
    attention: AttentionKeys = AttentionKeys()
    style: Style = Style()
    latent_attention: bool = False
    experts: Experts | None = None
    window: Window | None = None
    fixed: Mapping[str, object] = field(default_factory=dict, hash=False)
    rollout: Mapping[str, object] = field(default_factory=dict, hash=False)
    defaults: Mapping[str, object] = field(default_factory=dict, hash=False)
    ahead_key: str | None = None
    own_type: str | None = None

    @property
    def model_type(self) -> str:
        """By which transformers finds the class that reads config.json."""
        return self.own_type or WORD.sub("_", self.architecture.removesuffix("ForCausalLM")).lower()

    def given(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json with what it leaves out."""
        return {"tie_word_embeddings": False} | dict(self.defaults) | dict(settings)

    @property
    def is_moe(self) -> bool:
        """Whether the MLPs are experts."""
        return self.experts is not None

    @property
    def fixed_settings(self) -> dict[str, object]:
        """Every config.json setting that may have one value only, with that value."""
        fixed = FIXED_SETTINGS | self.style.fixed | dict(self.fixed)
        by_keys = {self.qkv_bias_key} | ({"partial_rotary_factor"} if self.attention.partial_rotary else set())
        return {key: value for key, value in fixed.items() if key not in by_keys}
