"""The description of one decoder-only architecture, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from megatron_rl.model.families.attention_keys import AttentionKeys
from megatron_rl.model.parts import Experts

WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""The positions in a name such as Qwen2Moe where a word begins."""
TRUNK = "model."
"""The beginning of the names of all tensors but the head's in a language model's folder."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""The beginning of the names of a layer's tensors in a folder."""

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
    c tanh(x / c); None: logits have no bound. layer_scales: a layer's output is multiplied by a number of its own.
    """

    activation: str = "silu"
    zero_centred_norms: bool = False
    norms_after: bool = False
    scaled_embedding: bool = False
    head_cap: str | None = None
    layer_scales: bool = False

    @property
    def fixed(self) -> dict[str, object]:
        """config.json settings that may have one value only because of the style."""
        return {
            "hidden_act": self.activation,
            "hidden_activation": self.activation,
            "use_bidirectional_attention": False,
        }


LISTED, STEP, FIRST = "mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace"
MLP_KINDS, DENSE, SPARSE = "mlp_layer_types", "dense", "sparse"
KINDS_RULE = {MLP_KINDS: (DENSE,)}
"""GLM-4.7-Flash's key: the kind of MLP of every layer. Absent: the first layer alone is dense."""
STEP_RULE = {LISTED: (), STEP: 1}
"""Qwen's keys: layers by number, and experts in every n-th layer only. Absent: experts are everywhere."""


def first_rule(absent: int) -> dict[str, object]:
    """DeepSeek's key: how many of the first layers are dense. absent: how many where config.json does not say."""
    return {FIRST: absent}


@dataclass(frozen=True)
class Window:
    """How config.json asks for attention to the last `sliding_window` positions only.

    switch: a setting that must be true for the window to apply; None: it always applies.
    default: the window if `sliding_window` is absent; an explicit null means no window.
    """

    switch: str | None = None
    default: int | None = None


@dataclass(frozen=True)
class MTPForm:
    """The form of a family's multi-token prediction (MTP) layer. architecture: the rollout engine's model of it.

    place, engine_place: the beginning of its tensors' names in a folder and in the rollout engine, in which `{layer}`
    is the number of the model's layers. names: those of the
    norm of the embedding, of the norm of the hidden states, of the projection, and of the last norm. head: the engine's
    name of its head. reads_unnormed: it reads hidden states as they are before the model's last norm, and projects them
    in front of the embedding instead of behind it.
    """

    architecture: str
    place: str = "model.layers.{layer}."
    engine_place: str = "model.layers.{layer}."
    names: tuple[str, str, str, str] = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    head: str = "model.layers.{layer}.shared_head.head.weight"
    reads_unnormed: bool = False


@dataclass(frozen=True)
class Carried:
    """Which tensors of a folder are carried: neither read nor trained, and written again by exports untouched.

    prefixes: beginnings of their names. ahead_key: the config.json key of the number of multi-token prediction (MTP)
    layers after the others, which are passed through, too; None: there are none. mtp: the form of such a layer; None:
    the rollout engine has no model of it. A run with `speculative=mtp` reads the layer, and may train it.
    """

    prefixes: tuple[str, ...] = ()
    ahead_key: str | None = None
    mtp: MTPForm | None = None

    @property
    def can_be(self) -> bool:
        """Whether a folder of the family can hold some."""
        return bool(self.prefixes) or self.ahead_key is not None

    def has(self, name: str, settings: Mapping[str, Any]) -> bool:
        """Whether a tensor of a folder with this config.json is one, if the model does not read it."""
        if name.startswith(self.prefixes):
            return True
        layer, ahead = LAYER.match(name), 0 if self.ahead_key is None else settings.get(self.ahead_key) or 0
        if layer is None or not ahead:
            return False
        last: int = settings["num_hidden_layers"]
        return last <= int(layer[1]) < last + ahead


@dataclass(frozen=True)
class Tower:
    """The vision tower next to a language model.

    model, module: transformers' folder and class of the module that computes it. prefix: the beginning of its tensors'
    names in a folder. ids, sections: defaults of the tokens that stand for an image and for a video, and of the field
    of `ImageForm`. has_levels: it also makes features for layers behind the first ones. gated: its MLPs are, and its
    norms have no biases. defaults: values of absent settings in `vision_config`.
    """

    model: str
    module: str
    prefix: str
    ids: tuple[int, int]
    sections: tuple[int, int, int]
    alternating: bool = True
    has_levels: bool = False
    gated: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Inside:
    """Where a language model is in the folder of a larger model, such as one that also reads images.

    text: the language model by itself; a critic is exported as its classifier. key: the object of config.json with its
    settings, which may also be outside of it. folder_prefix: stands in the names of a folder's tensors for the text
    model's "model.". engine_prefix: stands before the text model's names in the rollout engine. is_only_form: the
    language model is published in no other folder, so that runs on text name it, too. tower: computes features of
    images; None: the model reads text alone here.
    """

    text: Family
    key: str = "text_config"
    folder_prefix: str = "model.language_model."
    engine_prefix: str = "language_model."
    is_only_form: bool = False
    tower: Tower | None = None

    def in_folder(self, name: str) -> str:
        """The name in the folder of a tensor of the text model."""
        return self.folder_prefix + name.removeprefix(TRUNK) if name.startswith(TRUNK) else name

    def in_engine(self, name: str) -> str:
        """The name in the rollout engine of a tensor of the text model."""
        return self.engine_prefix + name


@dataclass(frozen=True)
class Family:
    """One architecture, under its names in config.json."""

    architecture: str
    """Name of the language model."""
    reward_architecture: str
    """Name of the same trunk with a classification head, `score.weight`."""
    qkv_bias: bool = False
    """Query, key and value projections have biases."""
    qk_norm: bool = False
    """Queries and keys are normalised per head."""
    qkv_bias_key: str | None = None
    """Key of config.json that decides about these biases; None where the architecture has no choice."""
    qk_norm_key: str | None = None
    """Key of config.json that decides about this norm; None where the architecture has no choice."""
    attention: AttentionKeys = AttentionKeys()
    """Keys of config.json about attention, and the part that they make."""
    style: Style = Style()
    """How a layer joins its parts."""
    experts: Experts | None = None
    """Routers and experts, in all layers or in those that config.json names; None: all layers are dense."""
    window: Window | None = None
    """Sliding-window attention that config.json may ask for; None: the architecture has none."""
    fixed: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Further config.json settings that may have one value only, or be absent."""
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Setting of `fixed` -> why it may have that value only; not for all of them."""
    rollout: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Settings that vLLM reads from config.json and that transformers does not need."""
    defaults: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Values of absent config.json settings, where they differ from the usual defaults."""
    carried: Carried = Carried()
    """Tensors of the folder besides those of the language model."""
    engine_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Module of a folder's tensors -> vLLM's name of it, where they differ."""
    unpacked: tuple[str, ...] = ()
    """Quantised weights that import unpacks: values of `quant_method` in config.json's quantization_config."""
    own_type: str | None = None
    """model_type of config.json, where it is not the architecture's name in lower case."""
    other_types: tuple[str, ...] = ()
    """Model types that published folders of the same arithmetic have, and transformers does not know."""
    inside: Inside | None = None
    """Place of the language model in a larger one, of which the rest is passed through; None: it is whole."""

    @property
    def model_type(self) -> str:
        """The name by which transformers finds the class that reads config.json."""
        return self.own_type or WORD.sub("_", self.architecture.removesuffix("ForCausalLM")).lower()

    @property
    def text(self) -> Family:
        """The language model as a whole model."""
        return self if self.inside is None else self.inside.text

    def within(
        self,
        architecture: str,
        model_type: str,
        carried: Carried,
        defaults: Mapping[str, object] = MappingProxyType({}),
        **places: Any,
    ) -> Family:
        """The family of a larger model with this language model inside.

        defaults: values of absent settings, if they differ from this model's. places: fields of `Inside`. With a tower
        it has a reward architecture of its own, of which the tower is a part; else that of the language model.
        """
        inside, absent = Inside(self, **places), dict(self.defaults) | dict(defaults)
        own = architecture.replace("ForConditionalGeneration", "ForSequenceClassification")
        return replace(
            self,
            architecture=architecture,
            reward_architecture=self.reward_architecture if inside.tower is None else own,
            own_type=model_type,
            carried=carried,
            defaults=absent,
            inside=inside,
        )

    def classifier(self, with_tower: bool) -> Family:
        """The family whose reward architecture an exported critic has. with_tower: the run reads images."""
        return self if with_tower and self.inside is not None and self.inside.tower is not None else self.text

    def given(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a config.json with defaults for absent ones."""
        return {"tie_word_embeddings": False} | dict(self.defaults) | dict(settings)

    def unpacks(self, settings: Mapping[str, Any]) -> bool:
        """Whether a config.json has quantised weights that import unpacks."""
        quantised = settings.get("quantization_config")
        return isinstance(quantised, Mapping) and quantised.get("quant_method") in self.unpacked

    @property
    def fixed_settings(self) -> dict[str, object]:
        """Every config.json setting that may have one value only, with that value."""
        fixed = FIXED_SETTINGS | self.style.fixed | dict(self.fixed)
        by_keys = {self.qkv_bias_key} | ({"partial_rotary_factor"} if self.attention.partial_rotary else set())
        return {key: value for key, value in fixed.items() if key not in by_keys}
