"""Write the trained weights as a Hugging Face folder that `transformers` and vLLM load.

Phase 1: all ranks exchange which parameters each holds, and make the same plan: files, and the rank that writes each.
Phase 2: for each file, the pieces of its tensors meet on its writer. A stage's tensors are written by a rank of that
         stage, so that stages write at the same time and nothing crosses them. No rank holds more than one file.
Phase 3: rank 0 writes index, config and tokenizer, and renames the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.checkpoint.hf_folder import (
    MAX_SHARD_BYTES,
    Description,
    ExportFile,
    describe_model,
    plan_export,
    write_files,
)
from megatron_rl.checkpoint.hf_tensors import HFTensor, TensorPiece, hf_tensors, pieces, put_together
from megatron_rl.checkpoint.pass_through import PassThroughTensors
from megatron_rl.model.families import ParamSpec
from megatron_rl.observe.liveness import made_progress
from megatron_rl.parallel.rank_grid import TrainGrid
from megatron_rl.parallel.sharding import Place


@torch.no_grad()
def export_hf(
    weights: ScatteredTensors,
    target: Path,
    description: Description,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    constants: Mapping[str, Tensor] = MappingProxyType({}),
    carried: PassThroughTensors | None = None,
) -> None:
    """Write the model to `target`, with config and tokenizer from its source; every rank must call.

    All ranks must see the same file system. An existing `target` is replaced. constants: further whole tensors of the
    folder, the same on all ranks. carried: tensors that are copied from the source. Rank 0 writes both.
    """
    carried = carried or PassThroughTensors()
    further = {name: tensor.nbytes for name, tensor in constants.items()} | carried.sizes
    sizes, holders = weights.sizes | further, weights.holders | dict.fromkeys(further, (0,))
    files, num_bytes = plan_export(sizes, holders, max_shard_bytes), sum(sizes.values())

    def gather(file: ExportFile) -> dict[str, Tensor]:
        whole = weights.gather(file)
        if dist.get_rank() == 0:
            whole |= {name: constants[name] for name in file.tensors if name in constants}
            whole |= {name: carried.read(name) for name in file.tensors if name in carried.stored}
        return whole

    def describe(folder: Path) -> None:
        describe_model(folder, files, num_bytes, description)

    # Phases 2 and 3
    write_files(target, files, gather, describe, dist.get_rank(), dist.barrier)


@dataclass(frozen=True)
class ScatteredTensors:
    """Tensors of a folder whose pieces are on the ranks of a grid.

    tensors: by their names in the folder. places: of all ranks. holders: tensor -> the ranks of one stage that together
    hold it. dtypes: of the tensors. read: returns this rank's shard of a parameter by its Megatron name.
    """

    tensors: dict[str, HFTensor]
    places: dict[int, Place]
    holders: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    read: Callable[[str], Tensor]

    @classmethod
    def of(
        cls,
        named_parameters: Mapping[str, Tensor],
        specs: Mapping[str, ParamSpec],
        grid: TrainGrid,
        vocab_multiple: int,
        read: Callable[[str], Tensor] | None = None,
    ) -> ScatteredTensors:
        """Phase 1, which every rank must call.

        named_parameters: this rank's parameters under global Megatron names. specs: of the tensors. read: as of the
        class; None: the parameters themselves.
        """
        places = {other: grid.place(other, vocab_multiple) for other in range(grid.world_size)}
        held: list[Any] = [None] * grid.world_size
        dist.all_gather_object(held, {name: parameter.dtype for name, parameter in named_parameters.items()})
        tensors = {tensor.name: tensor for tensor in hf_tensors(specs)}
        parameters = {tensor.parameter for tensor in tensors.values()}
        by_parameter = {name: holders_of(name, held, places, grid) for name in parameters}
        holders = {name: by_parameter[tensor.parameter] for name, tensor in tensors.items()}
        dtypes = {name: held[holders[name][0]][tensor.parameter] for name, tensor in tensors.items()}
        return cls(tensors, places, holders, dtypes, read or (lambda name: named_parameters[name].detach()))

    @property
    def sizes(self) -> dict[str, int]:
        """Tensor -> bytes."""
        return {name: tensor.numel * self.dtypes[name].itemsize for name, tensor in self.tensors.items()}

    def gather(self, file: ExportFile) -> dict[str, Tensor]:
        """The whole tensors of one file on its writer, nothing elsewhere; the file's ranks must call."""
        rank, whole = dist.get_rank(), dict[str, Tensor]()
        for name in file.tensors:
            if name not in self.tensors:
                continue  # a constant or a pass-through tensor, which rank 0 has
            made_progress()
            tensor = self.tensors[name]
            parts = pieces(tensor, file.holders[name], self.places)
            if rank == file.writer:
                whole[name] = put_together(tensor, ((piece, self._fetched(tensor, piece)) for piece in parts))
                continue
            for piece in parts:
                if piece.rank == rank:
                    dist.send(self._held(tensor, piece), dst=file.writer)
        return whole

    def _held(self, tensor: HFTensor, piece: TensorPiece) -> Tensor:
        return tensor.as_in_folder(self.read(tensor.parameter)[piece.source].cpu()).contiguous()

    def _fetched(self, tensor: HFTensor, piece: TensorPiece) -> Tensor:
        if piece.rank == dist.get_rank():
            return self._held(tensor, piece)
        received = torch.empty(piece.shape, dtype=self.dtypes[tensor.name])
        dist.recv(received, src=piece.rank)
        return received


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
