"""The description of one decoder-only architecture, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.model.families.attention_parts import AttentionKeys

WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""The positions in a name such as Qwen2Moe where a word begins."""

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
    """How a layer is built from its parts.

    activation: of the gated MLP, by config.json's name. zero_centred_norms: a norm's weight w stands for 1 + w.
    norms_after: outputs of attention and MLP are normalised before they are added. scaled_embedding: embeddings are
    multiplied by the square root of the hidden size. head_cap: the config.json key of a bound c on logits, as
    c tanh(x / c); None: logits have no bound.
    """

    activation: str = "silu"
    zero_centred_norms: bool = False
    norms_after: bool = False
    scaled_embedding: bool = False
    head_cap: str | None = None

    @property
    def fixed(self) -> dict[str, object]:
        """config.json settings that may have one value only because of the style."""
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
class Window:
    """How config.json asks for attention to the last `sliding_window` positions only.

    switch: a setting that must be true for the window to apply; None: it always applies.
    default: the window if `sliding_window` is absent; an explicit null means no window.
    """

    switch: str | None = None
    default: int | None = None


@dataclass(frozen=True)
class Family:
    """One architecture, under its names in config.json.

    architecture: the language model. reward_architecture: the same trunk with a classification head, `score.weight`.
    qkv_bias: q, k and v projections have biases. qk_norm: queries and keys are normalised per head. qkv_bias_key,
    qk_norm_key: the config.json key that says so, in families where it is a choice.
    attention: how attention differs from plain attention. style: how a layer is built from its parts.
    latent_attention: keys and values are made from a short latent vector (`LatentAttention`).
    experts: MLPs are routers over experts, in all layers or in those that config.json names; None: all are dense.
    window: sliding-window attention that config.json may ask for; None: the architecture has none.
    fixed: further config.json settings that may have one value only (or be absent).
    defaults: values of absent config.json settings, if they differ from the usual defaults.
    rollout: settings that vLLM reads from config.json and that transformers does not need.
    ahead_key: the config.json key of the number of multi-token prediction layers after the others, which are not
    loaded; None: the family has none. own_type: the model_type of config.json, if it is not the architecture's name in
    lower case.
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
        """The name by which transformers finds the class that reads config.json."""
        return self.own_type or WORD.sub("_", self.architecture.removesuffix("ForCausalLM")).lower()

    def given(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a config.json with defaults for absent ones."""
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
