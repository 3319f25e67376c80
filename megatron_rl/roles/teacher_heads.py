"""The heads of teachers on the actor's last stage, cut as the actor's: there whole distributions are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.checkpoint.hf_import import HFFolder
from megatron_rl.config.roles import RoleSpec
from megatron_rl.hybrid_engine.offload import HostCopy, Offloadable
from megatron_rl.model.families import Model, head_cap
from megatron_rl.model.families.params import HEAD
from megatron_rl.model.head_distillation import OtherHead
from megatron_rl.model.log_probs import VocabSoftmax
from megatron_rl.observe.memory_ledger import storage_bytes
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.teacher import compared_tokens, distillation_temperature
from megatron_rl.roles.token_scorer import TokenScorer


def teacher_heads(rank: Rank, actor: TokenScorer) -> list[OtherHead]:
    """The head of each teacher, in the order of their roles. Each rank reads its rows from the teacher's folder.

    A teacher that is the actor has the actor's own head, as it is when it is used. Raises ConfigError as `HFFolder`.
    """
    return [_head(spec, rank, actor) for spec in rank.placement.teachers]


def bytes_of_heads(rank: Rank, heads: Sequence[OtherHead]) -> dict[str, int]:
    """Bytes of the heads that `teacher_heads` read, under the names of the memory plan."""
    return {f"{spec.name} head": storage_bytes([head.weight]) for spec, head in _read(rank, heads)}


def offloadable_heads(rank: Rank, heads: Sequence[OtherHead]) -> list[Offloadable]:
    """The heads that are offloaded during generation, as the parameters of their teachers are."""
    leaving = [head.weight for spec, head in _read(rank, heads) if spec.megatron.param_offload]
    return [HostCopy(lambda: leaving)] if leaving else []


def _read(rank: Rank, heads: Sequence[OtherHead]) -> list[tuple[RoleSpec, OtherHead]]:
    # Before the last stage there are none.
    return [(spec, head) for spec, head in zip(rank.placement.teachers, heads, strict=False) if not spec.is_actor]


def _head(spec: RoleSpec, rank: Rank, actor: TokenScorer) -> OtherHead:
    settings = rank.folders[spec.model_path].language_config.to_dict()
    num_tokens = compared_tokens(rank, settings["vocab_size"])
    temperature = distillation_temperature(rank.config)
    softmax = VocabSoftmax(num_tokens, temperature, rank.groups.tp_group, head_cap(settings))
    own = actor.head.weight.detach()
    if spec.is_actor:
        return OtherHead(own, softmax)
    model = Model.of(settings)
    matrix = model.specs[HEAD]
    (name,), shape = matrix.hf_names, matrix.tensor.segments[0].shape
    rows = torch.zeros(len(own), shape[1], dtype=getattr(torch, spec.megatron.dtype), device=own.device)
    first = rank.groups.tp_group.rank() * len(own)
    last = max(first, min(first + len(own), num_tokens))
    read_rows(Path(spec.model_path), name, (first, last), shape, rows[: last - first])
    return OtherHead(rows, softmax)


def read_rows(path: Path, name: str, part: tuple[int, int], shape: tuple[int, ...], rows: Tensor) -> None:
    """Read the rows `part` of a matrix of this shape from a model folder into `rows`."""
    HFFolder(path).copy_box(name, (part, (0, shape[1])), shape, rows)
