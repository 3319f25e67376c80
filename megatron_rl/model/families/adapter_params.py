"""Adapters of a model as parameters: which linears have one, and the shape, cut and names of each A and B. No torch.

An adapter is cut as vLLM cuts it: of a linear cut by outputs A is whole and B is cut by outputs; of one cut by inputs
A is cut by inputs and B is whole; of one that is not cut both are whole. Those of experts are stacked as their matrices
are, and cut by experts in addition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from megatron_rl.config.lora import INPUTS, LINEARS, LoraConfig
from megatron_rl.config.problems import nearest_name
from megatron_rl.errors import ConfigError
from megatron_rl.model.families.family import Inside
from megatron_rl.model.families.mtp_params import MTP
from megatron_rl.model.families.vision import without_tower
from megatron_rl.model.parts import ParamSpec, is_one_by_one
from megatron_rl.parallel.sharding import LogicalTensor, Segment

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has buffers for. A smaller adapter is held with rows of zeros, which stay 0 in training."""
ALL_LINEAR = "all-linear"
CANONICAL = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "gate_proj": "linear_fc1_gate",
    "up_proj": "linear_fc1_up",
    "w1": "linear_fc1_gate",
    "w3": "linear_fc1_up",
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
}
"""Name of a projection in a folder -> its name in verl's canonical_lora, where it is not Megatron's."""
OWN_INPUTS = ("linear_down", "linear_q", "linear_q_up", "linear_kv_up", "linear_qkvz")
"""Linears for which `linear_qkv` stands in attention without one of this name: they make queries, keys and values."""
PROJECTING = frozenset((*LINEARS, *OWN_INPUTS, "linear_ba"))
"""Megatron's names of the linears that can have adapters."""
STACKED = {"w13": "linear_fc1", "w2": "linear_fc2"}
"""Megatron's name of a linear of routed experts, by the stack of all of a rank."""
PEFT_PREFIX = "base_model.model."
LORA_A, LORA_B = "lora_A", "lora_B"
EACH = "{expert}."
"""In the name of a matrix that every expert has."""


def held_rank(rank: int) -> int:
    """Rows of A and columns of B in memory: the least that vLLM has."""
    return min(size for size in ENGINE_RANKS if size >= rank)


@dataclass(frozen=True)
class Projection:
    """One matrix that may have an adapter, or one of each expert, E of them in a stack.

    weight: Megatron's parameter, `decoder.layers.0.self_attention.linear_qkv.weight` or `decoder.layers.0.mlp.experts.
    w13`. name: in transformers, `model.layers.0.self_attn.q_proj`; those of experts have `{expert}` in it. engine:
    vLLM's name. segments: the matrix [out, in] or [E, out, in], and what cuts it along `tp_dim`; several are sections
    of it. numbers: of its segments in the parameter, one after the other.
    """

    weight: str
    name: str
    engine: str
    segments: tuple[Segment, ...]
    tp_dim: int
    numbers: tuple[int, ...]
    is_expert: bool

    @property
    def module(self) -> str:
        """Megatron's module that has the parameter."""
        return self.weight.rpartition(".")[0]

    @property
    def linear(self) -> str:
        """Megatron's name of the linear: of experts `decoder.layers.0.mlp.experts.linear_fc1`."""
        own = self.weight.rpartition(".")[2]
        return f"{self.module}.{STACKED[own]}" if self.is_expert else self.module

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs) of the matrix."""
        return sum(segment.shape[-2] for segment in self.segments), self.segments[0].shape[-1]

    @property
    def aliases(self) -> set[str]:
        """Names by which a key may ask for it in every layer."""
        own, linear = self.name.rpartition(".")[2], self.linear.rpartition(".")[2]
        stands_for = {INPUTS} if linear in OWN_INPUTS else set()
        return {own, linear, CANONICAL.get(own, linear), ALL_LINEAR} | stands_for

    def matches(self, pattern: str) -> bool:
        """Whether a key's element names it."""
        if "*" in pattern or "." in pattern:
            parent = self.linear.rpartition(".")[0]
            full = (self.name, self.linear, *(f"{parent}.{alias}" for alias in self.aliases))
            return any(fnmatchcase(name, pattern) for name in full)
        return pattern in self.aliases

    @property
    def adapter_names(self) -> tuple[str, str]:
        """Megatron's names of A and of B."""
        prefix = f"{self.module}.adapters.{self.name.rpartition('.')[2]}"
        return f"{prefix}.{LORA_A}", f"{prefix}.{LORA_B}"

    def params(self, rank: int) -> dict[str, ParamSpec]:
        """Megatron name -> spec of A [rank, in] and B [out, rank], or of the stacks of all experts'."""
        first, stack = self.segments[0], self.segments[0].shape[:-2]
        by_rows = self.tp_dim == len(stack)
        a = Segment("A", (*stack, rank, first.shape[-1]), 1 if by_rows else first.num_units)
        b = tuple(
            Segment(each.name, (*stack, each.shape[-2], rank), each.num_units if by_rows else 1)
            for each in self.segments
        )
        cuts = {LORA_A: ((a,), None if by_rows else self.tp_dim), LORA_B: (b, self.tp_dim if by_rows else None)}
        return {
            name: ParamSpec(
                LogicalTensor(f"{self.engine}.{kind}", segments, tp_dim, self.is_expert),
                (f"{PEFT_PREFIX}{self.name}.{kind}.weight",) * len(segments),
            )
            for name, (kind, (segments, tp_dim)) in zip(self.adapter_names, cuts.items(), strict=True)
        }


def projections_of(specs: Mapping[str, ParamSpec]) -> list[Projection]:
    """The matrices of a model that may have an adapter: those of attention, MLPs, shared and routed experts.

    Experts that a folder has in stacks may have none, nor a multi-token prediction layer: PEFT, which builds the model
    with transformers, has no such layer.
    """
    return _projections({name: spec for name, spec in _own(specs).items() if not _is_stored_stack(spec)})


def merged_alone(specs: Mapping[str, ParamSpec]) -> str:
    """Return why generation reads adapters of this model merged alone; "" where vLLM adds them to its own products."""
    linears = [each for each in projections_of(specs) if not each.is_expert]
    first = {each.linear.rpartition(".")[2]: each.name for each in reversed(linears)}
    if "linear_kv_up" in first:
        return f"vLLM has no adapter for {first['linear_kv_up']}, with parts of whose weight it multiplies by itself"
    if "linear_qkvz" in first:
        return f"vLLM has the adapter of {first['linear_qkvz']} in several buffers, and training has it in one"
    for each in linears:
        if each.linear.endswith(INPUTS) and len(set(specs[each.weight].hf_names)) == 2:
            return f"vLLM has an adapter for {each.name} together with one of values alone, which have no linear there"
    return next((f"vLLM has no adapter for {name}" for linear, name in first.items() if linear not in LINEARS), "")


def _own(specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """The parameters without those of a multi-token prediction layer and of a vision tower."""
    return {name: spec for name, spec in without_tower(specs).items() if not name.startswith(MTP)}


def _is_stored_stack(spec: ParamSpec) -> bool:
    return spec.tensor.is_expert and not is_one_by_one(spec)


def _projections(specs: Mapping[str, ParamSpec]) -> list[Projection]:
    projections: list[Projection] = []
    for name, spec in specs.items():
        linear, _, kind = name.rpartition(".")
        is_linear = kind == "weight" and linear.rpartition(".")[2] in PROJECTING
        if not is_linear and not spec.tensor.is_expert:
            continue
        tp_dim, is_expert = spec.tensor.tp_dim, spec.tensor.is_expert
        assert tp_dim is not None  # linears are cut
        for number, (segment, hf_name) in enumerate(zip(spec.tensor.segments, spec.hf_names, strict=True)):
            own = module_name(hf_name, spec)
            if number and spec.hf_names[number - 1] == hf_name:  # one more section
                last = projections[-1]
                projections[-1] = replace(last, segments=(*last.segments, segment), numbers=(*last.numbers, number))
                continue
            parent = spec.tensor.name.rsplit(".", 2)[0]
            engine = hf_name.removesuffix(".weight") if is_expert else f"{parent}.{own.rpartition('.')[2]}"
            projections.append(Projection(name, own, engine, (segment,), tp_dim, (number,), is_expert))
    return projections


def module_name(hf_name: str, spec: ParamSpec) -> str:
    """The module in transformers whose weight is `hf_name` in a folder. Inside of a larger model both may differ."""
    own = hf_name.removesuffix(".weight")
    if not spec.tensor.name.startswith(Inside.engine_prefix):
        return own
    return f"{Inside.folder_prefix}layers.{own.partition('layers.')[2]}"


def adapted(specs: Mapping[str, ParamSpec], lora: LoraConfig) -> list[Projection]:
    """The matrices that `lora` gives adapters to. Raises ConfigError for an element that names none."""
    candidates = projections_of(specs)
    # A key may name stacks of experts. They have no adapters all the same: a plan refuses it.
    stacks = stored_stacks(specs)
    for pattern in [*lora.target_modules, *lora.exclude_modules]:
        if not any(each.matches(pattern) for each in (*candidates, *stacks)):
            names = sorted({alias for each in candidates for alias in each.aliases})
            raise ConfigError(f"{pattern} names no linear of the model; did you mean: {nearest_name(pattern, names)}")
    return [each for each in candidates if _any(each, lora.target_modules) and not _any(each, lora.exclude_modules)]


def stored_stacks(specs: Mapping[str, ParamSpec]) -> list[Projection]:
    """Return the experts that a folder has in transposed stacks, which have no adapters."""
    stored = {name: spec for name, spec in _own(specs).items() if _is_stored_stack(spec)}
    return _projections({name: spec for name, spec in stored.items() if spec.transposed})


def _any(projection: Projection, patterns: Iterable[str]) -> bool:
    return any(projection.matches(pattern) for pattern in patterns)


def adapter_specs(specs: Mapping[str, ParamSpec], lora: LoraConfig) -> dict[str, ParamSpec]:
    """Megatron name -> spec of every A and B, held with `held_rank` rows; {} without adapters.

    specs: of the model. Raises ConfigError for a target that names none of its linears, or if none is left.
    """
    return _specs(specs, lora, held_rank(lora.rank)) if lora.rank else {}


def peft_specs(specs: Mapping[str, ParamSpec], lora: LoraConfig) -> dict[str, ParamSpec]:
    """Specs as of `adapter_specs`, with the configured rank: the tensors of a PEFT folder."""
    return _specs(specs, lora, lora.rank) if lora.rank else {}


def _specs(specs: Mapping[str, ParamSpec], lora: LoraConfig, rank: int) -> dict[str, ParamSpec]:
    result: dict[str, ParamSpec] = {}
    for projection in adapted(specs, lora):
        result |= projection.params(rank)
    if not result:
        raise ConfigError("target_modules without exclude_modules leave no linear; try: exclude_modules=[]")
    return result


def peft_targets(specs: Mapping[str, ParamSpec], lora: LoraConfig) -> list[str]:
    """The adapted matrices as PEFT's target_modules: endings of names that no other matrix has, as short as can be.

    specs: of the model. Inside of a larger one, whose other matrices may have any ending, names are whole. PEFT takes
    `q_proj` for every matrix whose name is it or ends in `.q_proj`; those of experts are named without a number.
    """
    chosen = adapted(specs, lora)
    wanted = {each.name.replace(EACH, "") for each in chosen}
    if any(specs[each.weight].tensor.name.startswith(Inside.engine_prefix) for each in chosen):
        return sorted(wanted)
    every = (name for spec in _own(specs).values() for name in spec.hf_names)
    others = {name.removesuffix(".weight").replace(EACH, "") for name in every} - wanted
    taken = {ending for name in others for ending in _endings(name)}
    return sorted({next(ending for ending in _endings(name) if ending not in taken) for name in wanted})


def _endings(name: str) -> list[str]:
    """The last part of a name, the last two, and so on up to the whole."""
    parts = name.split(".")
    return [".".join(parts[-size:]) for size in range(1, len(parts) + 1)]


MergedRows = dict[str, dict[tuple[int, ...], tuple[str, str]]]
"""Weight of linears -> numbers of adjacent segments -> the names of A and B that are merged into them."""


def merged_rows(specs: Mapping[str, ParamSpec], adapters: Iterable[str]) -> MergedRows:
    """Return which A and B are merged into which rows.

    specs: the model's. adapters: names of A and B, as in `adapter_specs`.
    """
    rows: MergedRows = {}
    names = set(adapters)
    for projection in projections_of(specs):
        name_a, name_b = projection.adapter_names
        if name_a in names:
            rows.setdefault(projection.weight, {})[projection.numbers] = (name_a, name_b)
    return rows
