"""Adapters that share one A, read as adapters of single matrices: A is copied, and B is cut by outputs.

Two forms are known: Megatron-Bridge's of fused linears, `linear_qkv.adapter.linear_in.weight`, as whole tensors, and
PEFT's of stacked experts, as its `target_parameters` asks for. Needs no torch.

Legend: r rows of A, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from megatron_rl.checkpoint.hf_tensors import hf_tensors
from megatron_rl.model.families import ParamSpec
from megatron_rl.model.families.adapter_params import EACH, LORA_A, LORA_B

if TYPE_CHECKING:
    from torch import Tensor

FUSED = re.compile(
    r"decoder\.layers\.\d+\.(self_attention|mlp|mlp\.shared_experts)\.linear_(qkv|proj|fc1|fc2)"
    r"\.adapter\.linear_(in|out)\.weight"
)
BRIDGE = {LORA_A: "linear_in", LORA_B: "linear_out"}


@dataclass(frozen=True)
class Source:
    """Where A or B of one matrix is in a file: in the tensor `name` of `shape`.

    expert: its number in a tensor of `num_experts`, A [E r, in] or B [out, r E]. rows: of a shared B, run after run;
    None: all.
    """

    name: str
    shape: tuple[int, ...]
    num_experts: int = 1
    expert: int = 0
    rows: tuple[range, ...] | None = None

    def cut(self, tensor: Tensor) -> Tensor:
        """The matrix' own part."""
        if self.rows is not None:
            own = tensor[list(chain.from_iterable(self.rows))]
            return own.view(len(own), -1, self.num_experts)[:, :, self.expert]
        return tensor.view(self.num_experts, -1, tensor.shape[1])[self.expert]


def adapter_sources(specs: Mapping[str, ParamSpec], names: Iterable[str], rank: int) -> dict[str, Source]:
    """Name of each A and B in a PEFT folder -> where it is, in a file with tensors `names` of `rank`.

    specs: of all adapters, in the order of `adapter_specs`. Without a tensor that is shared, it is where it is named.
    """
    present, found = frozenset(names), dict[str, Source]()
    groups: dict[tuple[str, str, int | None], dict[str, ParamSpec]] = {}
    for name, spec in specs.items():
        module, _, matrix = name.partition(".adapters.")
        groups.setdefault((module, matrix.rpartition(".")[2], spec.tensor.tp_dim), {})[name] = spec
    for (module, kind, tp_dim), members in groups.items():
        first, is_a = next(iter(members.values())), kind == LORA_A
        shared, stack = f"{module}.adapter.{BRIDGE[kind]}.weight", 1
        if first.tensor.is_expert:
            shared, stack = (
                _shared_stack(first, kind, (tp_dim is None) == is_a, present),
                first.tensor.segments[0].shape[0],
            )
        rows = {} if is_a or shared not in present else _rows(module, members)
        for tensor in hf_tensors(members):
            out, columns = tensor.shape
            if shared not in present:
                found[tensor.name] = Source(tensor.name, (rank, columns) if is_a else (out, rank))
                continue
            shape = (stack * rank, columns) if is_a else (_count(rows.values()), rank * stack)
            found[tensor.name] = Source(shared, shape, stack, tensor.expert or 0, rows.get(tensor.parameter))
    return found


def _shared_stack(spec: ParamSpec, kind: str, by_outputs: bool, present: frozenset[str]) -> str:
    """PEFT's tensor of all experts; down's is the outer one of two. Empty: each expert has its own."""
    experts = spec.hf_names[0].partition(EACH)[0].removesuffix(".").replace("block_sparse_moe", "mlp")
    if f"{experts}.base_layer.{LORA_A}.weight" not in present:
        return ""
    return f"{experts}.{'base_layer.' if by_outputs else ''}{kind}.weight"


def _rows(module: str, members: Mapping[str, ParamSpec]) -> dict[str, tuple[range, ...]]:
    """The rows of each B in a shared one: one after the other. Megatron has queries, keys and values by groups: the
    queries that share a key, that key, its value.
    """
    segments = [spec.tensor.segments[0] for spec in members.values()]
    groups = segments[-1].num_units if module.endswith("linear_qkv") else 1
    sizes = [segment.shape[-2] // groups for segment in segments]
    rows, first = dict[str, tuple[range, ...]](), 0
    for name, size in zip(members, sizes, strict=True):
        rows[name] = tuple(range(start, start + size) for start in range(first, groups * sum(sizes), sum(sizes)))
        first += size
    return rows


def _count(rows: Iterable[tuple[range, ...]]) -> int:
    return sum(len(run) for runs in rows for run in runs)


def not_read(names: Iterable[str], linears: Iterable[str]) -> list[str]:
    """Tensors of Megatron's linears in a form that is not read, such as one adapter for all experts of a rank."""
    other = (name for name in names if not FUSED.fullmatch(name))
    return sorted(name for name in other if any(f".{linear}." in name for linear in linears))
