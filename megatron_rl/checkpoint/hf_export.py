"""Write the trained weights as a Hugging Face folder that `transformers` and vLLM load.

Phase 1: each rank offers its shards under their global names.
Phase 2: the different shards of each tensor meet on rank 0, which puts every part where it belongs.
Phase 3: rank 0 writes safetensors, config and tokenizer into a temporary folder and renames it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.rank_grid import TrainGrid
from megatron_rl.parallel.sharding import Place, box_index, shard_of


class WholeTensors:
    """Hugging Face tensors that are put together from shards; rows that only pad a vocabulary are dropped."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, spec: ParamSpec, place: Place, data: torch.Tensor) -> None:
        """Write the shard that the rank at `place` holds into the tensors it is a part of."""
        for part in shard_of(spec.tensor, place).parts:
            name, shape = spec.hf_names[part.segment], spec.tensor.segments[part.segment].shape
            piece, index = data[part.index], box_index(part.box)
            if not spec.tensor.is_expert:
                self._tensor(name, shape, data.dtype)[index] = piece
                continue
            for row, expert in enumerate(range(*part.box[0])):
                self._tensor(name.format(expert=expert), shape[1:], data.dtype)[index[1:]] = piece[row]

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name not in self.tensors:
            self.tensors[name] = torch.empty(shape, dtype=dtype)
        return self.tensors[name]


def owners_of(spec: ParamSpec, holders: list[int], places: dict[int, Place]) -> list[int]:
    """The first rank of `holders` for each different shard of a tensor."""
    first: dict[tuple, int] = {}
    for rank in holders:
        first.setdefault(shard_of(spec.tensor, places[rank]).parts, rank)
    return list(first.values())


def gather_to_rank_zero(
    shard: torch.Tensor | None, owners: list[int], offers: list[tuple[list[int], torch.dtype]]
) -> list[torch.Tensor] | None:
    """Shards of `owners` (global ranks) on rank 0, in order; None elsewhere. Owners and rank 0 must call.

    offers: shape and dtype of each owner's shard.
    """
    rank = dist.get_rank()
    if rank != 0:
        if rank in owners:
            dist.send(shard.contiguous(), dst=0)
        return None
    shards = []
    for owner, (shape, dtype) in zip(owners, offers, strict=True):
        if owner == 0:
            shards.append(shard)
            continue
        received = torch.empty(shape, dtype=dtype)
        dist.recv(received, src=owner)
        shards.append(received)
    return shards


@torch.no_grad()
def export_hf(
    named_parameters: dict[str, torch.nn.Parameter],
    specs: dict[str, ParamSpec],
    source: Path,
    target: Path,
    grid: TrainGrid,
    vocab_multiple: int,
) -> None:
    """Write the language model to `target`, with config and tokenizer from `source`; every rank must call.

    named_parameters: this rank's parameters under global Megatron names. An existing `target` is replaced.
    """
    # Phase 1: what every rank holds, known to all ranks.
    rank = dist.get_rank()
    places = {other: grid.place(other, vocab_multiple) for other in range(grid.world_size)}
    offers: list = [None] * grid.world_size
    dist.all_gather_object(offers, {name: (list(p.shape), p.dtype) for name, p in named_parameters.items()})
    whole = WholeTensors()
    done: set[str] = set()
    for name, spec in specs.items():
        # A tied head on the last stage is a copy of the embedding, which the first stage has sent.
        if spec.tensor.name in done:
            continue
        done.add(spec.tensor.name)
        owners = owners_of(spec, [other for other, offer in enumerate(offers) if name in offer], places)
        # Phase 2
        local = named_parameters[name].detach().cpu() if rank in owners else None
        shards = gather_to_rank_zero(local, owners, [offers[owner][name] for owner in owners])
        if shards is not None:
            for owner, shard in zip(owners, shards, strict=True):
                whole.add(spec, places[owner], shard)
    # Phase 3
    if rank == 0:
        write_folder(whole.tensors, AutoConfig.from_pretrained(source), source, target)
    dist.barrier()


def write_folder(tensors: dict[str, torch.Tensor], hf_config, source: Path, target: Path) -> None:
    """Write the folder under a temporary name and put it in place when complete."""
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, unfinished / "model.safetensors", metadata={"format": "pt"})
    hf_config.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source).save_pretrained(unfinished)
    if (source / "generation_config.json").exists():
        shutil.copy(source / "generation_config.json", unfinished)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
