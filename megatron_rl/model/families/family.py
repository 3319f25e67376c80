"""What distinguishes one decoder-only architecture from the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FIXED_SETTINGS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""config.json settings that may have one value only (or be absent), in every family."""


@dataclass(frozen=True)
class SharedExperts:
    """An MLP beside the experts that every token passes.

    block: its part of the experts' block. gate: the part of the block whose one row, by its sigmoid, scales a token's
    output; None: nothing does. size_key: the config.json key of its columns.
    """

    block: str
    size_key: str
    gate: str | None = None


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
    (`layers.py`).
    shared: an MLP that every token passes beside its experts; None: there is none.
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
    qkv_bias: q, k and v projections have biases. qk_norm: queries and keys are normalised per head.
    experts: MLPs are routers over experts, in all layers or those that config.json names; None: all are dense.
    window: sliding-window attention that config.json may ask for; None: the architecture has none.
    fixed: further config.json settings that may have one value only (or be absent).
    """

    architecture: str
    reward_architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    window: Window | None = None
    fixed: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def is_moe(self) -> bool:
        """Whether the MLPs are experts."""
        return self.experts is not None

    @property
    def fixed_settings(self) -> dict[str, object]:
        """Every config.json setting that may have one value only, with that value."""
        return FIXED_SETTINGS | dict(self.fixed)
