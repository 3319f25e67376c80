"""Muon on the shards of Megatron's distributed optimizer: the layers' matrices; Adam updates the rest.

Momentum is kept by elements, as Adam's moments are, so that checkpoints, copies and offloading treat both alike. Only
the orthogonalization needs whole matrices: data-parallel ranks take turns in owning one. The others send their runs of
its momentum to the owner, which joins the TP ranks' shards, computes, and sends the runs of the update back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.megatron import ALL_DIGITS, OverrideOptimizerConfig
from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.muon_runs import is_muon_matrix, runs_in_bucket
from megatron_rl.parallel.sharding import Place, Segment, Shard, shard_of
from megatron_rl.roles.orthogonal import MOMENTUM, orthogonalize, scale_factor

QKV = "qkv_proj"


@dataclass(frozen=True)
class CutMatrix:
    """A parameter that Muon updates: its shards on all TP ranks, and the run of this one on each data-parallel rank.

    main: [n] float32, what this rank updates, a leaf of the inner optimizer; None: nothing. group: its settings.
    """

    parameter: torch.nn.Parameter
    spec: ParamSpec
    shards: tuple[Shard, ...]
    tp_rank: int
    runs: tuple[tuple[int, int], ...]
    main: Tensor | None
    group: Mapping[str, Any]


class ShardedMuon:
    """Muon in front of one of Megatron's distributed optimizers, in whose step it takes part."""

    def __init__(self, part: Any, matrices: Sequence[CutMatrix], override: OverrideOptimizerConfig, tp_group: Any):
        """part: Megatron's optimizer, of dense layers or experts. tp_group: its ranks share the parameters."""
        self._inner, self._group, self._tp_group = part.optimizer, part.data_parallel_group, tp_group
        # Owners of one round have matrices of about the same size.
        self._matrices = sorted(matrices, key=lambda each: -each.parameter.numel())
        self._override = override
        self._dtype = torch.float32 if override.muon_fp32_matmul_prec == ALL_DIGITS else torch.bfloat16
        self._inner.register_step_pre_hook(lambda *_: self.step())

    def create(self) -> None:
        """Make the momentum of this rank's runs, unless it exists."""
        for matrix in self._matrices:
            if matrix.main is not None and not self._inner.state[matrix.main]:
                step = torch.tensor(0.0)
                self._inner.state[matrix.main] = {"step": step, MOMENTUM: torch.zeros_like(matrix.main.data)}

    @torch.no_grad()
    def step(self) -> None:
        """Update the matrices and take their gradients away, so that Adam passes over them. All ranks must call."""
        self.create()
        size = dist.get_world_size(self._group)
        for first in range(0, len(self._matrices), size):
            self._round(self._matrices[first : first + size])

    def _round(self, matrices: Sequence[CutMatrix]) -> None:
        """Update at most one matrix for each data-parallel rank. Its elements travel to the owner and back once."""
        size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        pieces = [self._momentum(matrix) for matrix in matrices]
        lengths = [len(piece) for piece in pieces] + [0] * (size - len(matrices))
        owned = matrices[rank] if rank < len(matrices) else None
        of_ranks = [0] * size if owned is None else [stop - start for start, stop in owned.runs]
        whole = self._exchange(torch.cat(pieces), lengths, of_ranks)
        if owned is not None:
            whole = self._orthogonal(owned, whole.view(owned.shards[owned.tp_rank].shape)).flatten()
        updates = self._exchange(whole, of_ranks, lengths).split(lengths[: len(matrices)])
        for matrix, update in zip(matrices, updates, strict=True):
            if matrix.main is not None:
                lr, decay = matrix.group["lr"], matrix.group["weight_decay"]
                matrix.main.mul_(1 - lr * decay).add_(update, alpha=-lr)
                matrix.main.grad = None

    def _momentum(self, matrix: CutMatrix) -> Tensor:
        """Add this rank's gradient to its momentum; return what is orthogonalized, [n]."""
        if matrix.main is None:
            return matrix.parameter.new_empty(0, dtype=torch.float32)
        state, gradient, rate = self._inner.state[matrix.main], matrix.main.grad, self._override.muon_momentum
        assert gradient is not None  # Megatron copies one for each parameter
        state["step"] += 1
        momentum: Tensor = state[MOMENTUM].lerp_(gradient, 1 - rate)
        return gradient.lerp(momentum, rate) if self._override.muon_use_nesterov else momentum

    def _exchange(self, sent: Tensor, lengths: list[int], received: list[int]) -> Tensor:
        if len(lengths) == 1:
            return sent
        arrived = sent.new_empty(sum(received))
        dist.all_to_all_single(arrived, sent, received, lengths, group=self._group)
        return arrived

    def _orthogonal(self, matrix: CutMatrix, shard: Tensor) -> Tensor:
        """Return the update of this TP rank's shard [n, m], or of a stack of experts [E, n, m]."""
        tensor, mine = matrix.spec.tensor, matrix.shards[matrix.tp_rank]
        cut = tensor.tp_dim is not None and len(matrix.shards) > 1 and self._override.muon_tp_mode != "blockwise"
        shards = [shard]
        if cut:
            shards = [torch.empty_like(shard) for _ in matrix.shards]
            dist.all_gather(shards, shard.contiguous(), group=self._tp_group)
        held = matrix.shards if cut else (mine,)
        update = torch.zeros_like(shard)
        dim = 0 if tensor.tp_dim is None else tensor.tp_dim
        for numbers in self._joined(tensor.segments, tensor.name):
            wholes = [segment_of(number, held, shards) for number in numbers]
            stacked = self._scaled(torch.cat([whole for whole, _ in wholes], dim))
            updates = stacked.split([whole.shape[dim] for whole, _ in wholes], dim)
            for number, whole, (_, first) in zip(numbers, updates, wholes, strict=True):
                for part in mine.parts:
                    if part.segment == number:
                        update[part.index] = whole[index_after(first, part.box)]
        return update

    def _joined(self, segments: Sequence[Segment], name: str) -> list[list[int]]:
        numbers = list(range(len(segments)))
        is_split = self._override.muon_split_qkv and QKV in name
        return [[number] for number in numbers] if is_split else [numbers]

    def _scaled(self, matrix: Tensor) -> Tensor:
        if matrix.dim() == 3:
            return torch.stack([self._scaled(each) for each in matrix])
        num_rows, num_columns = matrix.shape
        factor = scale_factor(num_rows, num_columns, self._override.muon_scale_mode)
        factor *= self._override.muon_extra_scale_factor
        return orthogonalize(matrix, self._override.muon_num_ns_steps, self._dtype) * factor


def segment_of(number: int, held: Sequence[Shard], shards: Sequence[Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    """Return what the shards have of a segment, as one tensor, and the index in the segment of its first element."""
    parts = [(part, data) for at, data in zip(held, shards, strict=True) for part in at.parts if part.segment == number]
    boxes = list(zip(*(part.box for part, _ in parts), strict=True))
    first = tuple(min(low for low, _ in along) for along in boxes)
    last = [max(high for _, high in along) for along in boxes]
    whole = shards[0].new_zeros([high - low for low, high in zip(first, last, strict=True)])
    for part, data in parts:
        whole[index_after(first, part.box)] = data[part.index]
    return whole, first


def index_after(first: Sequence[int], box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """Return the index of a box in a tensor that begins at `first`."""
    return tuple(slice(low - at, high - at) for at, (low, high) in zip(first, box, strict=True))


def muon_parts(
    optimizer: Any,
    override: OverrideOptimizerConfig,
    specs: Mapping[torch.nn.Parameter, tuple[str, ParamSpec]],
    place: Place,
    tp_group: Any,
) -> Iterator[ShardedMuon]:
    """Put Muon in front of each of Megatron's distributed optimizers. specs: each parameter's name and spec.

    Every data-parallel rank must find the same matrices. tp_group: the TP group of dense layers; that of
    experts is Megatron's.
    """
    from megatron.core import parallel_state

    for part in optimizer.chained_optimizers:
        matrices = [
            cut_matrix(part, buffer, parameter, specs[parameter][1], place)
            for buffer in part.buffers
            for parameter in buffer.params
            if is_muon_matrix(specs[parameter][0], specs[parameter][1].tensor)
        ]
        if matrices:
            of_experts = matrices[0].spec.tensor.is_expert
            group = parallel_state.get_expert_tensor_parallel_group() if of_experts else tp_group
            yield ShardedMuon(part, matrices, override, group)


def cut_matrix(part: Any, buffer: Any, parameter: torch.nn.Parameter, spec: ParamSpec, place: Place) -> CutMatrix:
    """Find a parameter's shards and runs in one of DDP's buffers."""
    start, stop, number = buffer.param_index_map[parameter]
    bucket, size = buffer.buckets[number], dist.get_world_size(part.data_parallel_group)
    runs = runs_in_bucket(start - bucket.offset, stop - bucket.offset, bucket.grad_data.numel(), size)
    # A rank with no element of the parameter has no leaf for it.
    main, group = None, dict[str, Any]()
    if parameter in part.model_param_group_index_map:
        group_number, order = part.model_param_group_index_map[parameter]
        group = part.optimizer.param_groups[group_number]
        main = group["params"][order]
    if spec.tensor.is_expert:
        places, tp_rank = [place._replace(etp_rank=rank) for rank in range(place.etp_size)], place.etp_rank
    else:
        places, tp_rank = [place._replace(tp_rank=rank) for rank in range(place.tp_size)], place.tp_rank
    shards = tuple(shard_of(spec.tensor, each) for each in places)
    return CutMatrix(parameter, spec, shards, tp_rank, runs, main, group)
