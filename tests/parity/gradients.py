"""Log-probs and gradients of the policy loss, ours of one process and those of transformers' own model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from plain_policy import reduced_gradients
from tiny_models import random_batch
from updates import NUM_ROWS, text_rows

from megatron_rl.columns import ACTOR_SCORES, ACTOR_UPDATE
from megatron_rl.model.families import family_of
from megatron_rl.model.parts import Experts
from megatron_rl.records import Batch


def hugging_face_log_probs(path: str, model: torch.nn.Module | None = None) -> torch.Tensor:
    """Log-prob of every response token of the experience under transformers' own model, one row after the other.

    With a `model` gradients can flow into it; without, one is read from `path`.
    """
    from megatron_rl.controller.report import hf_model

    if model is None:
        model = hf_model(path).requires_grad_(False)
    experience = random_batch(NUM_ROWS)
    expected = []
    for ids, length in zip(experience["input_ids"].unbind(), experience.num_sampled.tolist(), strict=True):
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected.append(log_probs.gather(-1, ids[1:, None])[-length:, 0])
    return torch.cat(expected)


def policy_gradients(config, rows_of: Callable[[Any], Batch] = text_rows) -> dict:
    """What one rank knows of its rows: log-probs, and gradients of the policy loss over all ranks where old log-probs
    are equal to them. rows_of: as of `updates.one_update`.
    """
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    where, actor = worker.coordinates(), worker.roles["actor"]
    experience = rows_of(worker)
    mine = experience[torch.arange(len(experience)).tensor_split(where.dp_size)[where.dp_rank]]
    scores = actor.log_probs(mine.read_by(ACTOR_SCORES))
    # No stage before the last computes a loss, so any old ones do.
    mine.add(old_log_probs=mine["advantages"] if scores is None else scores["old_log_probs"])
    for _ in range(2):  # Megatron's first pass finds out when gradients are ready to be reduced
        actor.compute_gradients(mine.read_by(ACTOR_UPDATE))
    return {
        "where": where,
        "place": worker.groups.grid.place(worker.groups.rank, vocab_multiple=64),
        "log_probs": None if scores is None else scores.flat("old_log_probs"),
        "actor_weights": reduced_gradients(actor, worker.groups.dp_group),
    }


def hugging_face_gradients(path: str) -> dict[str, torch.Tensor]:
    """Gradients of -mean(advantage * log-prob) under transformers' own model, experts as on disk."""
    from megatron_rl.controller.report import hf_model

    model, advantages = hf_model(path), random_batch(NUM_ROWS)["advantages"].values()
    (-hugging_face_log_probs(path, model) * advantages).mean().backward()
    return gradients_on_disk(path, model)


def gradients_on_disk(path: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that transformers' model has, by the names of its folder."""
    from megatron_rl.checkpoint.hf_import import HFFolder

    on_disk = HFFolder(Path(path)).files
    names = family_of(model.config.architectures).experts or Experts()
    gradients = {}
    for name, parameter in model.named_parameters():
        name = name.replace(".mlp.", f".{names.block}.")
        stack, _, kind = name.rpartition(".")
        if name in on_disk:
            gradients[name] = parameter.grad
        elif kind == "gate_up_proj":
            for expert, (gate, up) in enumerate(grad.chunk(2) for grad in parameter.grad):
                single = f"{stack}.{expert}."
                gradients |= {f"{single}{names.gate}.weight": gate, f"{single}{names.up}.weight": up}
        elif kind == "down_proj":
            of_experts = enumerate(parameter.grad)
            gradients |= {f"{stack}.{expert}.{names.down}.weight": grad for expert, grad in of_experts}
        else:
            gradients[name] = parameter.grad
    return gradients
