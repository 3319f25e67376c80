"""An actor after an update, or from a checkpoint: its greedy answers, its export, and a checkpoint of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from rollout_checks import GREEDY, round_trip, tokens
from tiny_models import random_batch
from updates import NUM_ROWS

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.records import RoleState


def updated(config, folder: Path, saved: Path | None = None) -> dict:
    """One update, or what a checkpoint holds; greedy answers, an export, and a checkpoint of it."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    actor, metrics = worker.roles["actor"], {}
    if saved is not None:
        states = json.loads((saved / "states.json").read_text())
        worker.load_checkpoint(saved, {"actor": RoleState(**states)})
    else:
        rows = torch.arange(NUM_ROWS).tensor_split(worker.groups.grid.dp_size)[worker.groups.dp_rank]
        mine = random_batch(NUM_ROWS)[rows]
        mine.add(old_log_probs=mine["advantages"].clone())
        metrics = actor.update(mine.read_by(ACTOR_UPDATE))
    greedy, _ = round_trip(worker, GREEDY)
    actor.export_hf(folder / "exported")
    if saved is None:
        (folder / "saved" / "actor").mkdir(parents=True, exist_ok=True)
        states = worker.begin_save(folder / "saved")
        worker.finish_save(wait=True)
        (folder / "saved" / "states.json").write_text(json.dumps(asdict(states["actor"])))
    return {"greedy": tokens(greedy), "metrics": metrics}
