"""Write the trained weights as a Hugging Face folder that `transformers` and vLLM load.

Phase 1: all ranks learn which parameters each holds, and make the same plan: files, and the rank that writes each.
Phase 2: for each file, the pieces of its tensors meet on its writer. A stage's tensors are written by a rank of that
         stage, so that stages write at the same time and nothing crosses them. No rank holds more than one file.
Phase 3: rank 0 writes index, config and tokenizer, and renames the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.checkpoint.hf_folder import (
    MAX_SHARD_BYTES,
    Description,
    file_names,
    finish_folder,
    plan_files,
    save_tensors,
    start_folder,
    unfinished_folder,
)
from megatron_rl.checkpoint.hf_tensors import HFTensor, TensorPiece, hf_tensors, pieces, put_together
from megatron_rl.model.families import ParamSpec
from megatron_rl.observe.liveness import made_progress
from megatron_rl.parallel.rank_grid import TrainGrid
from megatron_rl.parallel.sharding import Place


@dataclass(frozen=True)
class ExportFile:
    """One file of weights: its tensors, the ranks that hold shards of each, and the rank that writes it."""

    name: str
    holders: dict[str, tuple[int, ...]]
    writer: int

    @property
    def tensors(self) -> list[str]:
        """Names in the order in which they are gathered."""
        return list(self.holders)

    @property
    def ranks(self) -> set[int]:
        """All that have something to do for this file."""
        return {self.writer}.union(*self.holders.values())


def plan_export(sizes: dict[str, int], holders: dict[str, tuple[int, ...]], max_shard_bytes: int) -> list[ExportFile]:
    """The files of an export: one that rank 0 writes where all fits, else each stage's own, written by its first rank.

    sizes: tensor -> bytes. holders: tensor -> the ranks of one stage that together hold it.
    """
    if sum(sizes.values()) <= max_shard_bytes:
        (only,) = file_names(1)
        return [ExportFile(only, holders, writer=0)]
    stages: dict[int, dict[str, int]] = {}
    for name, size in sizes.items():
        stages.setdefault(min(holders[name]), {})[name] = size
    groups = [(first, names) for first, stage in stages.items() for names in plan_files(stage, max_shard_bytes)]
    return [
        ExportFile(file, {name: holders[name] for name in names}, writer)
        for file, (writer, names) in zip(file_names(len(groups)), groups, strict=True)
    ]


@torch.no_grad()
def export_hf(
    named_parameters: dict[str, torch.nn.Parameter],
    specs: dict[str, ParamSpec],
    source: Path,
    target: Path,
    grid: TrainGrid,
    vocab_multiple: int,
    architecture: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    constants: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Write the model to `target`, with config and tokenizer from `source`; every rank must call.

    named_parameters: this rank's parameters under global Megatron names. All ranks must see the same file system.
    architecture: what the folder's config.json calls the model. An existing `target` is replaced.
    constants: whole tensors that lie beside those of the model, the same on all ranks; rank 0 writes them.
    """
    # Phase 1
    rank = dist.get_rank()
    places = {other: grid.place(other, vocab_multiple) for other in range(grid.world_size)}
    held: list[Any] = [None] * grid.world_size
    dist.all_gather_object(held, {name: parameter.dtype for name, parameter in named_parameters.items()})
    tensors = {tensor.name: tensor for tensor in hf_tensors(specs)}
    parameters = {tensor.parameter for tensor in tensors.values()}
    by_parameter = {name: holders_of(name, held, places, grid) for name in parameters}
    holders = {name: by_parameter[tensor.parameter] for name, tensor in tensors.items()}
    dtypes = {name: held[holders[name][0]][tensor.parameter] for name, tensor in tensors.items()}
    sizes = {name: tensor.numel * dtypes[name].itemsize for name, tensor in tensors.items()}
    sizes |= {name: tensor.nbytes for name, tensor in constants.items()}
    holders |= dict.fromkeys(constants, (0,))
    files = plan_export(sizes, holders, max_shard_bytes)
    # Phase 2
    unfinished = unfinished_folder(target)
    if rank == 0:
        start_folder(target)
    dist.barrier()
    for file in files:
        if rank == file.writer:
            beside = {name: tensor for name, tensor in constants.items() if name in file.holders}
            gathered = gather_file(file, tensors, places, named_parameters, dtypes)
            save_tensors(gathered | beside, unfinished / file.name)
            del gathered  # the next file is gathered when this one is gone
        elif rank in file.ranks:
            gather_file(file, tensors, places, named_parameters, dtypes)
    dist.barrier()
    # Phase 3
    if rank == 0:
        description = Description(source, architecture, next(iter(dtypes.values())))
        finish_folder(target, {file.name: file.tensors for file in files}, sum(sizes.values()), description)
    dist.barrier()


def holders_of(
    parameter: str, held: list[dict[str, torch.dtype]], places: dict[int, Place], grid: TrainGrid
) -> tuple[int, ...]:
    """The ranks of the first stage that has a parameter, one for each place; later stages only have copies of it."""
    ranks = [rank for rank, names in enumerate(held) if parameter in names]
    stage = grid.pp_rank(ranks[0])
    first: dict[Place, int] = {}
    for rank in ranks:
        if grid.pp_rank(rank) == stage:
            first.setdefault(places[rank], rank)
    return tuple(first.values())


def gather_file(
    file: ExportFile,
    tensors: dict[str, HFTensor],
    places: dict[int, Place],
    named_parameters: dict[str, torch.nn.Parameter],
    dtypes: dict[str, torch.dtype],
) -> dict[str, torch.Tensor]:
    """The whole tensors of one file on its writer, nothing elsewhere; the file's ranks must call."""
    rank, whole = dist.get_rank(), {}

    def held(tensor: HFTensor, piece: TensorPiece) -> torch.Tensor:
        return named_parameters[tensor.parameter].detach()[piece.source].cpu().contiguous()

    def fetched(tensor: HFTensor, piece: TensorPiece) -> torch.Tensor:
        if piece.rank == rank:
            return held(tensor, piece)
        received = torch.empty(piece.shape, dtype=dtypes[tensor.name])
        dist.recv(received, src=piece.rank)
        return received

    for name in file.tensors:
        if name not in tensors:
            continue  # a constant, which its writer has
        made_progress()
        tensor = tensors[name]
        parts = pieces(tensor, file.holders[name], places)
        if rank == file.writer:
            whole[name] = put_together(tensor, ((piece, fetched(tensor, piece)) for piece in parts))
            continue
        for piece in parts:
            if piece.rank == rank:
                dist.send(held(tensor, piece), dst=file.writer)
    return whole
