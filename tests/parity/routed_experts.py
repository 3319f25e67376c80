"""Rows with experts that no router would choose, and what an engine's own experts make of log-probs."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch
from rollout_checks import RANDOM, ask, prompts
from scenarios import SaveModel
from tiny_models import random_batch, run_config, tie_routers
from updates import NUM_ROWS

from megatron_rl.columns import ACTOR_SCORES
from megatron_rl.records import Batch, ragged, ragged_from_lengths, repeated, row_lengths, single_turn

NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 6, 2
BOUND = 5e-5
"""What dense models keep in float32, engine against trainer."""
REPLAY = "actor_rollout_ref__actor__router_replay__mode"


def tied(save: SaveModel) -> SaveModel:
    """Return a recipe for the same model with routers that tie."""

    @functools.wraps(save)
    def save_tied(folder: Path, **changes) -> str:
        return tie_routers(save(folder, **changes))

    save_tied.__name__ = f"save_tied_{save.__name__.removeprefix('save_')}"
    return save_tied


def tied_config(path: str, tp_size: int = 1, pp_size: int = 1, **changes):
    return run_config(path, tp_size, pp_size, **{"actor_rollout_ref__rollout__max_num_seqs": 16} | changes)


def random_choices(lengths: torch.Tensor, seed: int) -> torch.Tensor:
    """Ragged [B, (T), layers, K]: K different experts for every token and layer."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(int(lengths.sum()), NUM_LAYERS, NUM_EXPERTS, generator=generator).argsort(-1)
    return ragged_from_lengths(order[..., :TOP_K].to(torch.uint8), lengths)


def experience_with_choices() -> Batch:
    """Rows of which several share a prompt, with experts that no router would choose, but for the last token of each.

    Rows 0 to 3 have one prompt, whose tokens go to the same experts in rows 0, 1 and 3.
    """
    experience = random_batch(NUM_ROWS)
    lengths, answers = row_lengths(experience["input_ids"]), experience.num_sampled
    rows = list(experience["input_ids"].unbind())
    prompt = rows[0][: lengths[0] - answers[0]]
    for row in (1, 2, 3):
        rows[row] = torch.cat([prompt, rows[row][lengths[row] - answers[row] :]])
    lengths = torch.tensor([len(row) for row in rows])
    choices = list(random_choices(lengths - 1, seed=2).unbind())
    for row in (1, 3):
        choices[row][: len(prompt) - 1] = choices[0][: len(prompt) - 1]
    experience.add(single_turn(ragged(rows), answers))
    experience.add(routed_experts=ragged_from_lengths(torch.cat(choices), lengths - 1))
    return experience


def share(worker) -> Batch:
    """This data-parallel rank's rows."""
    where = worker.coordinates()
    return experience_with_choices()[torch.arange(NUM_ROWS).tensor_split(where.dp_size)[where.dp_rank]]


def differences(config) -> dict | None:
    """Of what the engine sampled: the trainer's log-probs against its own, with replay and without; last stage only."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    actor, asked = worker.roles["actor"], repeated(prompts(), 3)
    worker.roles["rollout"].enter()
    found = ask(worker.roles["rollout"], asked, dataclasses.replace(RANDOM, with_experts=True))
    worker.roles["rollout"].exit()
    assert torch.equal(row_lengths(found["routed_experts"]), row_lengths(found["input_ids"]) - 1)
    columns = found.read_by(ACTOR_SCORES)
    with_replay, without = actor.log_probs(columns), actor.log_probs_without_replay(columns)
    if with_replay is None:
        return None
    by_engine = found.flat("rollout_log_probs")
    counts = with_replay["num_other_experts"]
    return {
        "with": float((with_replay.flat("old_log_probs") - by_engine).abs().max()),
        "without": float((without.flat("old_log_probs") - by_engine).abs().max()),
        "others": int(counts.sum()) / found.flat("routed_experts").numel(),
    }
