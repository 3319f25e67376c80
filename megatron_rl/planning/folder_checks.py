"""Check a Hugging Face model folder, and read the sizes of its model from config.json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.identity import EPS
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.checkpoint.weight_files import odd_files
from megatron_rl.config.file_kinds import ABSENT, instead_of_file
from megatron_rl.config.json_files import UnreadableFileError
from megatron_rl.config.problems import divisors, nearest_name, nearest_number
from megatron_rl.errors import Violation
from megatron_rl.model.families import (
    FAMILIES,
    REWARD_FAMILIES,
    VOCAB_PADDING,
    Family,
    Model,
    Routing,
    dense_layers_problem,
    experts_of,
    kinds_by_period,
    num_experts_key,
    num_labels,
    refusal_of,
    rope_of,
    rope_problem,
    rotary_share,
    routing_of,
    routing_problem,
    sliding_window,
)
from megatron_rl.model.parts import Attention, SharedExperts
from megatron_rl.parallel.sharding import padded_vocab_size
from megatron_rl.planning.config_json import (
    is_size,
    not_finite,
    too_large,
    wrong_types,
)
from megatron_rl.planning.folder_files import FolderFiles, lacking_in
from megatron_rl.planning.folder_weights import (
    FolderWeights,
    no_mtp,
    unpacked_weights,
    unread_weights,
    weights_problems,
)
from megatron_rl.planning.hub_cache import is_hub_id

SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
NULLABLE = ("n_group", "topk_group", "sliding_window", "rope_theta", "rope_parameters")
"""Keys with a default that transformers lets be null."""
NOT_NULL = "must have a value or be left out: transformers reads no null there"
STARTING_POINTS = FAMILIES | REWARD_FAMILIES
"""Architectures that a critic can start from: a language model's trunk, or a reward model."""


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of config.json that a layout must fit."""

    path: str
    """The model's folder."""
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    padded_vocab_size: int
    """Vocabulary, padded as generation pads it."""
    num_hidden_layers: int
    max_position_embeddings: int
    vocab_size: int
    num_experts: int = 0
    """0 for a dense model."""
    moe_intermediate_size: int = 0
    """Columns of one expert; 0 for a dense model."""
    expert_size_key: str = "moe_intermediate_size"
    """Name of moe_intermediate_size in config.json."""
    sliding_window: int | None = None
    """Positions that a token attends to; None: all before it."""
    even_heads: bool = True
    """Whether `head_dim` is given, or the hidden size divides into heads."""
    has_dense_layers: bool = False
    """Whether some layers of a model with experts are dense."""
    shared_experts: tuple[str, int] | None = None
    """Name and columns of the MLP of shared experts, which TP shards like a dense one; None without any."""
    has_expert_bias: bool = False
    """Whether experts are chosen by score plus bias."""
    unread: str | None = None
    """One line that names weights which are not read but may have been meant. None: no such weights, or not checked."""
    unpacked: str | None = None
    """One line about weights that are stored in fewer bits. None: no such weights, or not checked."""
    no_mtp: str | None = None
    """Why the multi-token prediction layer cannot be read. None: it can, or the folder was not checked."""
    model: Model | None = None
    """The model as its parts; None where only the numbers above are known."""

    @property
    def parts(self) -> Model:
        """The model as its parts. Raises ValueError for numbers without a folder."""
        if self.model is None:
            raise ValueError(f"{self.path} was not read")
        return self.model

    @property
    def attention(self) -> Attention:
        """The attention of its layers."""
        return self.parts.attention

    def rollout_divides(self, ep_size: int) -> dict[str, int]:
        """Name -> value of every size that generation shards over its TP ranks, with each expert or their number."""
        sizes = self.tp_divides | {"padded_vocab_size": self.padded_vocab_size}
        if not self.num_experts:
            return sizes
        of_experts = {self.expert_size_key: self.moe_intermediate_size}
        return sizes | ({"num_experts": self.num_experts} if ep_size > 1 else of_experts)

    @property
    def tp_divides(self) -> dict[str, int]:
        """Name -> value of every size that TP must divide. ETP shards experts, and the vocabulary is padded."""
        mlp = () if self.num_experts and not self.has_dense_layers else ("intermediate_size",)
        names = ("num_attention_heads", "num_key_value_heads", *mlp)
        sizes = {name: getattr(self, name) for name in names} | dict(
            [self.shared_experts] if self.shared_experts else ()
        )
        return sizes if self.model is None else sizes | self.model.attention.tp_divides

    @property
    def longest(self) -> dict[str, int]:
        """Name -> most tokens of prompt and response together. Sequences must fit a sliding window, too."""
        return {"max_position_embeddings": self.max_position_embeddings} | self.windows

    @property
    def windows(self) -> dict[str, int]:
        """Name -> tokens of the sliding window, if there is one."""
        return {} if self.sliding_window is None else {"sliding_window": self.sliding_window}

    @property
    def max_tp(self) -> int:
        """The largest TP size that training and generation can have; the others are its divisors."""
        return math.gcd(self.padded_vocab_size, *self.tp_divides.values())


def read_model_folder(
    key: str, model: ModelFolder, known: Mapping[str, Family] = FAMILIES, *, config_only: bool = False
) -> tuple[ModelSizes | None, list[Violation]]:
    """Return the sizes of the model in a folder (None if they cannot be read) and everything wrong with the folder.

    key: configuration key to name in messages. known: allowed architectures and their families. config_only: weights
    and tokenizer may be missing.
    """
    folder, path = model.path, str(model.given)
    given = {key: path}
    if not folder.is_dir():
        return None, [_no_folder(key, path, folder)]
    try:
        odd = [] if config_only else odd_files(folder)
        if odd:
            return None, [Violation(given, f"must hold files that can be read: {fault}") for fault in odd]
        described, problems = _described(key, model, known)
        if config_only:
            return None if described is None else described.sizes, problems
        files = FolderFiles.read(model)
    except OSError as error:
        return None, [Violation(given, f"must be a folder that can be read: {error.strerror}")]
    faulty = [Violation(given, f"{rule}; it holds {_listing(folder)}") for rule in lacking_in(folder)]
    faulty += [Violation(given, f"must be complete: {fault}") for fault in files.faults]
    if described is None:
        return None, [*faulty, *problems]
    return _with_files(key, described, files, [*faulty, *problems])


@dataclass(frozen=True)
class _Described:
    """A model as config.json describes it."""

    sizes: ModelSizes
    family: Family
    settings: dict[str, Any]


def _no_folder(key: str, path: str, folder: Path) -> Violation:
    parent = folder.parent
    neighbours = [str(other) for other in parent.iterdir() if other.is_dir()] if parent.is_dir() else []
    nearest = {key: nearest_name(str(folder), neighbours)} if neighbours else {}
    hint = "" if neighbours else f"{parent} holds no folder"
    if is_hub_id(path):
        hint = f"the local Hugging Face cache has no model of that name either: hf download {path}"
    lacks = instead_of_file(folder) or "it is a file"
    return Violation({key: path}, f"must be a Hugging Face model folder, and {lacks}", nearest, hint, wrong_name=True)


def _described(key: str, model: ModelFolder, known: Mapping[str, Family]) -> tuple[_Described | None, list[Violation]]:
    """Return the model of config.json, None if it describes none, and everything wrong with it."""
    folder, path, file = model.path, str(model.given), model.path / "config.json"
    given = {key: path}
    lacks = instead_of_file(file)
    if lacks == ABSENT:
        return None, [Violation(given, f"must hold config.json; it holds {_listing(folder)}")]
    try:
        settings = model.settings
    except UnreadableFileError as error:
        return None, [Violation(given, f"must hold a config.json, and {folder}/{error}")]
    wrong = wrong_types(settings)
    wrong |= dict.fromkeys(not_finite(settings) - wrong.keys(), "must hold finite numbers")
    if wrong:
        return None, [_in_file(file, {name: settings[name]}, rule) for name, rule in wrong.items()]
    architectures = settings.get("architectures") or []
    name = next((name for name in architectures if name in known), None)
    if name is None:
        theirs = str(architectures[0]) if architectures else ""
        rule = f"must be one of {', '.join(sorted(known))} for {key}"
        lacking = {"architectures": architectures}
        is_refused = bool(theirs) and theirs not in STARTING_POINTS
        refusal = refusal_of(theirs) if is_refused else None
        near = refusal.nearest if refusal is not None and refusal.nearest in known else _nearest(theirs, known)
        unknown = _in_file(file, lacking, rule, {"architectures": [near]})
        if refusal is not None:
            unknown = replace(unknown, hint=f"{theirs} needs {refusal.needs}, which is not supported")
        return None, [unknown]
    sizes, problems = _read_settings(path, file, settings, known[name])
    if name in REWARD_FAMILIES and num_labels(settings) != 1:
        labels = {"num_labels": num_labels(settings)}
        rule = f"must be 1, because {key} is to give one value"
        problems.append(_in_file(file, labels, rule, {"num_labels": 1}))
    return None if sizes is None else _Described(sizes, known[name], settings), problems


def _nearest(architecture: str, known: Mapping[str, Family]) -> str:
    """Return the allowed architecture with the same trunk, else the one with the nearest name."""
    family = STARTING_POINTS.get(architecture)
    own = () if family is None else (family.architecture, family.reward_architecture)
    return next((name for name in own if name in known), None) or nearest_name(architecture, known)


def _with_files(
    key: str, model: _Described, files: FolderFiles, problems: list[Violation]
) -> tuple[ModelSizes, list[Violation]]:
    """Check config.json and the other files against each other, where each is right by itself."""
    sizes = model.sizes
    largest = max(files.tokens.values(), default=0)
    file = Path(sizes.path).expanduser() / "config.json"
    if largest >= sizes.vocab_size:
        size = {"vocab_size": sizes.vocab_size}
        rule = f"must be above {largest}, the largest number of a token in its tokenizer.json"
        problems.append(_in_file(file, size, rule, {"vocab_size": largest + 1}))
    if model.settings.get("model_type") is None:
        rule = "must exist, as transformers reads config.json by it"
        problems.append(_in_file(file, {"model_type": None}, rule, {"model_type": model.family.model_type}))
    if problems:
        return sizes, problems
    weights = FolderWeights.of(files.tensors, model.settings, model.family)
    problems += weights_problems(key, sizes.path, weights, model.settings)
    left, stored = unread_weights(sizes.path, weights), unpacked_weights(sizes.path, weights)
    lacking = no_mtp(sizes.parts, model.settings, files.tensors)
    return replace(sizes, unread=left, unpacked=stored, no_mtp=lacking), problems


def _in_file(file: Path, settings: dict[str, Any], rule: str, nearest: dict[str, Any] | None = None) -> Violation:
    return Violation(settings, rule, nearest or {}, file=str(file))


def _read_settings(
    path: str, file: Path, settings: dict[str, Any], family: Family
) -> tuple[ModelSizes | None, list[Violation]]:
    problems = list(_unsupported(file, settings, family))
    nulls = [_in_file(file, {key: None}, NOT_NULL, {key: value}) for key, value in nulls_of(settings, family).items()]
    if nulls:
        return None, [*problems, *nulls]
    settings = family.given(settings)
    wanted: tuple[str, ...] = SIZES
    if family.experts is not None:
        # Where all layers have experts, no other MLP has columns.
        own = SIZES if family.experts.dense_keys else tuple(size for size in SIZES if size != "intermediate_size")
        wanted = (*own, num_experts_key(family, settings), family.experts.size_key, "num_experts_per_tok")
        shared = family.experts.shared
        wanted += () if shared is None else (shared.size_key,)
    wanted += family.attention.size_keys
    lacking = {name: settings.get(name) for name in dict.fromkeys(wanted) if not is_size(settings.get(name))}
    if lacking:
        return None, [*problems, _in_file(file, lacking, "must be whole numbers >= 1")]
    beyond = too_large(settings, (*wanted, "num_key_value_heads", "head_dim"))
    if beyond:
        return None, [*problems, *(_in_file(file, {k: settings[k]}, f"must be <= {beyond[k]}") for k in beyond)]
    if window_of(family, settings) == 0:
        return None, [*problems, _in_file(file, {"sliding_window": 0}, "must be >= 1, because layers have a window")]
    problems += _head_problems(file, settings, family) if family.attention.shares_hidden else []
    if not settings.get("head_dim") and settings["hidden_size"] < settings["num_attention_heads"]:
        return None, problems
    wrong = family.attention.problem(settings)
    if wrong is not None:
        return None, [*problems, _in_file(file, *wrong)]
    routing = routing_of(family, settings)
    if routing is not None:
        problems += _routing_problems(file, routing, family)
        wrong = dense_layers_problem(family, settings)
        problems += [] if wrong is None else [_in_file(file, *wrong)]
    return _sizes(path, settings, family, routing), problems


def nulls_of(settings: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return key -> default, of keys that are null where transformers' class of the family wants a value."""
    defaults = {"rms_norm_eps": EPS} | dict(family.text.defaults)
    wanted = {key: value for key, value in defaults.items() if value is not None and key not in NULLABLE}
    return {key: wanted[key] for key in wanted if key in settings and settings[key] is None}


def window_of(family: Family, settings: Mapping[str, Any]) -> int | None:
    """Return the positions in a window of all layers or of some; None where config.json asks for no window.

    settings: with the family's defaults. Where no window is asked for, transformers writes any number, such as 0.
    """
    window: int | None = settings.get("sliding_window") if family.attention.local else sliding_window(family, settings)
    return window


def _head_problems(file: Path, settings: dict[str, Any], family: Family) -> Iterable[Violation]:
    """Check hidden size, heads and key/value heads against each other, and the rotary share of a head."""
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    kv_heads = settings.get("num_key_value_heads") or heads
    if heads % kv_heads:
        nearest = {"num_key_value_heads": nearest_number(kv_heads, divisors(heads))}
        yield _in_file(file, {"num_key_value_heads": kv_heads}, f"must divide num_attention_heads({heads})", nearest)
    if not settings.get("head_dim") and hidden % heads:
        rule = f"must divide hidden_size({hidden}) where there is no head_dim"
        nearest = {"head_dim": hidden // heads // 2 * 2 or 2}
        yield _in_file(file, {"num_attention_heads": heads}, rule, nearest)
        return
    size, share = settings.get("head_dim") or hidden // heads, rotary_share(family.attention, settings)
    if not isinstance(share, int | float):
        return  # the rotary embedding's rule says so
    if not 0 < share <= 1 or int(size * share) % 2 or int(size * share) == 0:
        rule = f"must be a share of head_dim({size}) that is a whole even number of elements"
        yield _in_file(file, {"partial_rotary_factor": share}, rule, {"partial_rotary_factor": 1.0})
        return
    key = family.attention.turned_key
    turned = None if key is None else settings.get(key)
    if key is not None and turned is not None and turned != int(size * share):
        rule = (
            f"must be head_dim({size}) * partial_rotary_factor({share}) = {int(size * share)}: vLLM rotates the number "
            f"of elements of a head that {key} gives, and transformers reads partial_rotary_factor of rope_parameters "
            "alone"
        )
        yield _in_file(file, {key: turned}, rule, {"rope_parameters.partial_rotary_factor": turned / size})
    sections = rope_of(settings).get("mrope_section")
    if sections is not None and not _are_sections(sections, int(size * share) // 2):
        rule = f"must be whole numbers >= 1 that add up to {int(size * share) // 2}, half of a head's rotated elements"
        yield _in_file(file, {"mrope_section": sections}, rule)


def _are_sections(sections: object, total: int) -> bool:
    return isinstance(sections, list) and all(map(is_size, sections)) and sum(sections) == total


def _sizes(path: str, settings: dict[str, Any], family: Family, routing: Routing | None) -> ModelSizes:
    vocab_size = settings["vocab_size"]
    experts: dict[str, Any] = {}
    if routing is not None:
        shared = experts_of(family).shared
        experts = {
            "num_experts": routing.num_experts,
            "moe_intermediate_size": routing.ffn_size,
            "expert_size_key": experts_of(family).size_key,
            "has_dense_layers": bool(routing.dense_layers),
            "has_expert_bias": routing.scoring is not None and routing.scoring.bias is not None,
            "shared_experts": (name_of_size(shared), routing.shared_size) if shared and routing.shared_size else None,
        }
    model = Model.of(settings)
    heads, shape = settings["num_attention_heads"], model.shape
    has_size = bool(settings.get("head_dim")) or not family.attention.shares_hidden
    return ModelSizes(
        path=path,
        num_attention_heads=heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=settings.get("intermediate_size", shape.ffn_size),
        padded_vocab_size=padded_vocab_size(vocab_size, VOCAB_PADDING),
        num_hidden_layers=shape.num_layers,
        max_position_embeddings=settings["max_position_embeddings"],
        vocab_size=vocab_size,
        sliding_window=sliding_window(family, settings),
        even_heads=has_size or settings["hidden_size"] % heads == 0,
        model=model,
        **experts,
    )


def name_of_size(shared: SharedExperts) -> str:
    """Return the name in config.json of the columns of shared experts."""
    return shared.size_key if shared.count_key is None else f"{shared.count_key} * {shared.size_key}"


def _routing_problems(file: Path, routing: Routing, family: Family) -> list[Violation]:
    """Check how many experts a token is routed to."""
    top_k, num_experts, key = routing.experts_per_token, routing.num_experts, "num_experts_per_tok"
    if top_k > num_experts:
        return [_in_file(file, {key: top_k}, f"must be >= 1 and <= num_experts({num_experts})", {key: num_experts})]
    if top_k == 1 and routing.normalised:
        settings: dict[str, Any] = {key: 1, "norm_topk_prob": True}
        nearest: dict[str, Any] = {"norm_topk_prob": False}
        if experts_of(family).norm_topk_prob:
            settings, nearest = {key: 1}, {key: 2}
        rule = "leaves the router without a gradient, because the only weight, of a sum of 1, is always 1"
        return [_in_file(file, settings, rule, nearest)]
    return [_in_file(file, *wrong) for wrong in [routing_problem(routing)] if wrong is not None]


def _unsupported(file: Path, settings: dict[str, Any], family: Family) -> Iterable[Violation]:
    given = family.given(settings)
    problem = rope_problem(given, family.attention)
    if problem is not None:
        key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
        yield _in_file(file, {key: settings.get(key)}, f"cannot be used: {problem}")
    has_windows = family.attention.local or sliding_window(family, settings) is not None
    kinds = {"full_attention"} | family.attention.other_kinds | ({"sliding_attention"} if has_windows else set())
    layer_types = settings.get("layer_types") or ()
    unknown = set(layer_types) - kinds
    if unknown:
        nearest = {"layer_types": ["full_attention" if kind in unknown else kind for kind in layer_types]}
        rule = f"{', '.join(sorted(unknown))} is not supported"
        yield Violation(
            {"layer_types": layer_types}, f"with {rule} ({file})", nearest, file=str(file), subject="layer_types"
        )
    num_layers = settings.get("num_hidden_layers")
    if family.attention.local and layer_types and is_size(num_layers) and len(layer_types) != num_layers:
        yield _in_file(file, {"layer_types": layer_types}, f"must name the kind of each of the {num_layers} layers")
    elif family.attention.has_fixed_kinds and layer_types and is_size(num_layers):
        periodic = kinds_by_period(family.attention, settings)
        if list(layer_types) != periodic:
            rule = "must be what vLLM takes for granted, a window in every second layer from the first on"
            yield _in_file(file, {"layer_types": layer_types}, rule, {"layer_types": periodic})
    kind = settings.get("model_type")
    if kind is not None and kind not in (family.model_type, *family.other_types):
        rule = f"must be that of {family.architecture}, as transformers reads config.json by it"
        yield _in_file(file, {"model_type": kind}, rule, {"model_type": family.model_type})
    for name, required in family.fixed_settings.items():
        value = given.get(name, required)
        if name == "quantization_config" and family.unpacks(settings):
            continue
        if value != required and (value or required):
            because = f": {family.reasons[name]}" if name in family.reasons else ""
            yield _in_file(file, {name: value}, f"is not supported{because}", {name: required})


def _listing(folder: Path) -> str:
    return ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
