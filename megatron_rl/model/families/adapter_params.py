"""Adapters of a model as parameters: which linears have one, and the shape, cut and names of each A and B. No torch.

An adapter is cut as vLLM cuts it: of a linear cut by outputs A is whole and B is cut by outputs; of one cut by inputs
A is cut by inputs and B is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron_rl.config.lora import LINEARS, LoraConfig
from megatron_rl.config.problems import nearest_name
from megatron_rl.errors import ConfigError
from megatron_rl.model.parts import ParamSpec
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
}
"""Name of a projection in a folder -> its name in verl's canonical_lora, where it is not Megatron's."""
PEFT_PREFIX = "base_model.model."
LORA_A, LORA_B = "lora_A", "lora_B"


def held_rank(rank: int) -> int:
    """Rows of A and columns of B in memory: the least that vLLM has."""
    return min(size for size in ENGINE_RANKS if size >= rank)


@dataclass(frozen=True)
class Projection:
    """One matrix that may have an adapter. linear: Megatron's module, `decoder.layers.0.self_attention.linear_qkv`.

    name: in a folder, `model.layers.0.self_attn.q_proj`. segment: the matrix [out, in] and what cuts it along `tp_dim`.
    number: of its segment in the linear's stack.
    """

    linear: str
    name: str
    segment: Segment
    tp_dim: int
    number: int

    @property
    def aliases(self) -> set[str]:
        """Names by which a key may ask for it in every layer."""
        own, linear = self.name.rpartition(".")[2], self.linear.rpartition(".")[2]
        return {own, linear, CANONICAL.get(own, linear), ALL_LINEAR}

    def matches(self, pattern: str) -> bool:
        """Whether a key's element names it."""
        if "*" in pattern or "." in pattern:
            parent = self.linear.rpartition(".")[0]
            full = (self.name, self.linear, *(f"{parent}.{alias}" for alias in self.aliases))
            return any(fnmatchcase(name, pattern) for name in full)
        return pattern in self.aliases

    def params(self, rank: int) -> dict[str, ParamSpec]:
        """Megatron name -> spec of A [rank, in] and B [out, rank]."""
        rows, columns = self.segment.shape
        by_rows = self.tp_dim == 0
        a = Segment("A", (rank, columns), 1 if by_rows else self.segment.num_units)
        b = Segment("B", (rows, rank), self.segment.num_units if by_rows else 1)
        cuts = {LORA_A: (a, None if by_rows else 1), LORA_B: (b, 0 if by_rows else None)}
        return {
            f"{self.linear}.adapters.{self.name.rpartition('.')[2]}.{kind}": ParamSpec(
                LogicalTensor(f"{self.name}.{kind}", (segment,), tp_dim), (f"{PEFT_PREFIX}{self.name}.{kind}.weight",)
            )
            for kind, (segment, tp_dim) in cuts.items()
        }


def projections_of(specs: Mapping[str, ParamSpec]) -> list[Projection]:
    """The matrices of a model that may have an adapter: those of attention, of dense MLPs and of shared experts."""
    projections = []
    for name, spec in specs.items():
        linear, _, kind = name.rpartition(".")
        if kind != "weight" or linear.rpartition(".")[2] not in LINEARS or spec.tensor.is_expert:
            continue
        for number, (segment, hf_name) in enumerate(zip(spec.tensor.segments, spec.hf_names, strict=True)):
            assert spec.tensor.tp_dim is not None  # linears are cut
            projections.append(Projection(linear, hf_name.removesuffix(".weight"), segment, spec.tensor.tp_dim, number))
    return projections


def adapted(specs: Mapping[str, ParamSpec], lora: LoraConfig) -> list[Projection]:
    """The matrices that `lora` gives adapters to. Raises ConfigError for an element that names none.

    Megatron's own names may: linear_fc1 of a model whose MLPs are experts, which have no adapters.
    """
    candidates = projections_of(specs)
    for pattern in [*lora.target_modules, *lora.exclude_modules]:
        if pattern not in LINEARS and not any(each.matches(pattern) for each in candidates):
            names = sorted({alias for each in candidates for alias in each.aliases})
            raise ConfigError(f"{pattern} names no linear of the model; nearest: {nearest_name(pattern, names)}")
    return [each for each in candidates if _any(each, lora.target_modules) and not _any(each, lora.exclude_modules)]


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
        raise ConfigError("target_modules without exclude_modules leave no linear; nearest: exclude_modules=[]")
    return result


def peft_targets(specs: Mapping[str, ParamSpec], lora: LoraConfig) -> list[str]:
    """The adapted matrices as PEFT's target_modules: endings of names that no other matrix has, as short as can be.

    specs: of the model. PEFT takes `q_proj` for every matrix whose name is it or ends in `.q_proj`.
    """
    wanted = {each.name for each in adapted(specs, lora)}
    others = {name.removesuffix(".weight") for spec in specs.values() for name in spec.hf_names} - wanted
    taken = {ending for name in others for ending in _endings(name)}
    return sorted({next(ending for ending in _endings(name) if ending not in taken) for name in wanted})


def _endings(name: str) -> list[str]:
    """The last part of a name, the last two, and so on up to the whole."""
    parts = name.split(".")
    return [".".join(parts[-size:]) for size in range(1, len(parts) + 1)]


def merged_rows(specs: Mapping[str, ParamSpec], adapters: Iterable[str]) -> dict[str, dict[int, tuple[str, str]]]:
    """Weight of a linear -> number of its segment -> the names of A and B that are merged into it.

    specs: of the model. adapters: names of A and B, as in `adapter_specs`.
    """
    rows: dict[str, dict[int, tuple[str, str]]] = {}
    names = set(adapters)
    for projection in projections_of(specs):
        name_a, name_b = projection.params(1)
        if name_a in names:
            rows.setdefault(f"{projection.linear}.weight", {})[projection.number] = (name_a, name_b)
    return rows
