"""Write the trained weights as a Hugging Face folder that `transformers` and vLLM load.

Phase 1: each rank offers its shards under their global names.
Phase 2: the shards of each parameter meet on rank 0, which undoes the TP split and the fusion.
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
from megatron_rl.parallel.mpu import TrainGroups


def unfuse(shards: list[torch.Tensor], spec: ParamSpec, sizes: list[int], vocab_size: int) -> dict[str, torch.Tensor]:
    """HF tensors of one parameter from the shards of all TP ranks (in order).

    sizes: rows of each of `spec.hf_names` inside one shard. Padding rows of vocabularies are dropped.
    """
    if spec.tp_dim is None:
        return {spec.hf_names[0]: shards[0]}
    per_rank = [shard.split(sizes) for shard in shards]
    whole = {name: torch.cat([parts[i] for parts in per_rank], spec.tp_dim) for i, name in enumerate(spec.hf_names)}
    return {name: tensor[:vocab_size] if spec.padded_vocab else tensor for name, tensor in whole.items()}


def fused_sizes(spec: ParamSpec, shard_rows: int, q_to_kv: int) -> list[int]:
    """Rows of each fused part inside one shard of `shard_rows`; `q_to_kv` = query heads per key/value head."""
    if len(spec.hf_names) == 3:
        unit = shard_rows // (q_to_kv + 2)
        return [unit * q_to_kv, unit, unit]
    return [shard_rows // len(spec.hf_names)] * len(spec.hf_names)


def gather_to_rank_zero(shard: torch.Tensor | None, owners: list[int], shape: list[int], dtype: torch.dtype):
    """Shards of `owners` (global ranks) on rank 0, in order; None elsewhere. Owners and rank 0 must call."""
    rank = dist.get_rank()
    if rank != 0:
        if rank in owners:
            dist.send(shard.contiguous(), dst=0)
        return None
    shards = []
    for owner in owners:
        if owner == 0:
            shards.append(shard.clone())
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
    groups: TrainGroups,
) -> None:
    """Write the language model to `target`, with config and tokenizer from `source`; every rank must call.

    named_parameters: this rank's parameters under global Megatron names. An existing `target` is replaced.
    """
    # Phase 1: what every stage of the first model replica holds, known to all ranks.
    grid, rank = groups.grid, groups.rank
    offer = {name: (list(p.shape), p.dtype) for name, p in named_parameters.items()}
    offers: list = [None] * grid.world_size
    dist.all_gather_object(offers, offer)
    hf_config = AutoConfig.from_pretrained(source)
    ratio = hf_config.num_attention_heads // hf_config.num_key_value_heads
    tensors: dict[str, torch.Tensor] = {}
    for pp_rank in range(grid.pp_size):
        owners = [grid.rank(tp, 0, pp_rank) for tp in range(grid.tp_size)]
        for name, (shape, dtype) in offers[owners[0]].items():
            spec = specs[name]
            # A tied head on the last stage is a copy of the embedding, which the first stage has sent.
            if name == "output_layer.weight" and spec.logical_name == "model.embed_tokens.weight":
                continue
            # Phase 2
            local = named_parameters[name].detach().cpu() if rank in owners else None
            shards = gather_to_rank_zero(local, owners, shape, dtype)
            if rank == 0:
                tensors |= unfuse(shards, spec, fused_sizes(spec, shape[0], ratio), hf_config.vocab_size)
    # Phase 3
    if rank == 0:
        write_folder(tensors, hf_config, source, target)
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
