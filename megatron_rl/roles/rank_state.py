"""What of a checkpoint belongs to one rank alone: the states of its random number generators, as a JSON file.

They mean something to the same rank of the same grid only. In another layout every generator starts from the run's
seed, as at the beginning; samples and mini-batches do not depend on them.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_rl.hybrid_engine.rng import RNGState, from_hex, to_hex
from megatron_rl.parallel.mpu import TrainGroups


def rank_file(folder: Path, pool: str, rank: int) -> Path:
    """Where a rank of a pool keeps its state in a checkpoint."""
    return folder / f"rng_{pool}_{rank:05d}.json"


def save_rank_state(folder: Path, pool: str, groups: TrainGroups, rollout_rng: RNGState | None) -> None:
    """Write the generators of training, of generation and of Megatron's regions."""
    content = {
        "grid": dataclasses.asdict(groups.grid),
        "rank": groups.rank,
        "train": RNGState.capture().to_json(),
        "rollout": rollout_rng and rollout_rng.to_json(),
        "megatron": {name: to_hex(state) for name, state in get_cuda_rng_tracker().get_states().items()},
    }
    rank_file(folder, pool, groups.rank).write_text(json.dumps(content))


def load_rank_state(folder: Path, pool: str, groups: TrainGroups) -> tuple[bool, RNGState | None]:
    """Put back what `save_rank_state` wrote: (whether there was a state for this grid, the rollout's generators)."""
    file = rank_file(folder, pool, groups.rank)
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"grid": None}
    grid = content["grid"] and {"cp_size": 1} | content["grid"]  # checkpoints from before it was written have none
    if grid != dataclasses.asdict(groups.grid) or content["rank"] != groups.rank:
        return False, None
    RNGState.from_json(content["train"]).restore()
    get_cuda_rng_tracker().set_states({name: from_hex(text) for name, text in content["megatron"].items()})
    return True, content["rollout"] and RNGState.from_json(content["rollout"])
