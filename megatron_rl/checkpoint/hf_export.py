"""Write the trained weights as a Hugging Face folder that `transformers` and vLLM load.

Phase 1: all ranks exchange which parameters each holds, and make the same plan: files, and the rank that writes each.
Phase 2: for each file, the pieces of its tensors meet on its writer. A stage's tensors are written by a rank of that
         stage, so that stages write at the same time and nothing crosses them. No rank holds more than one file.
Phase 3: rank 0 writes index, config and tokenizer, and renames the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.checkpoint.hf_folder import (
    MAX_SHARD_BYTES,
    Description,
    ExportFile,
    plan_export,
    write_files,
)
from megatron_rl.checkpoint.hf_tensors import HFTensor, TensorPiece, hf_tensors, pieces, put_together
from megatron_rl.model.families import ParamSpec
from megatron_rl.observe.liveness import made_progress
from megatron_rl.parallel.rank_grid import TrainGrid
from megatron_rl.parallel.sharding import Place


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
    constants: further whole tensors of the folder, the same on all ranks; rank 0 writes them.
    """
    # Phase 1
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

    def gather(file: ExportFile) -> dict[str, torch.Tensor]:
        inside = {name: tensor for name, tensor in constants.items() if name in file.holders}
        return gather_file(file, tensors, places, named_parameters, dtypes) | inside

    # Phases 2 and 3
    description = Description(source, architecture, next(iter(dtypes.values())))
    write_files(target, files, gather, sum(sizes.values()), description, dist.get_rank(), dist.barrier)


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
