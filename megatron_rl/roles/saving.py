"""One rank's part of a checkpoint: saving its roles, the files it reports, and the states of its random generators.

The states of generators are a JSON file of the rank alone. They fit the same rank of the same grid only; in another
layout every generator starts from the run's seed, as at the beginning. Samples and mini-batches do not depend on them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_rl.checkpoint.contents import reference_beside
from megatron_rl.checkpoint.manifest import FileRecord, digest_files
from megatron_rl.checkpoint.sharded_files import CheckpointWriter, files_of_rank
from megatron_rl.checkpoint.storage import writing
from megatron_rl.device import Device
from megatron_rl.hybrid_engine.rng import RNGState, from_hex, to_hex
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.roles.role import TrainedRole
from megatron_rl.roles.role_checkpoint import ReferenceCheckpoint


@dataclass(frozen=True)
class UnfinishedSave:
    """A save in progress. All ranks must call `finish` together. parts: the folders in `folder` that are written."""

    folder: Path
    parts: tuple[str, ...]
    state_file: Path
    rank: int
    writer: CheckpointWriter

    def finish(self, wait: bool) -> dict[str, FileRecord] | None:
        """Size and checksum of each file of this rank, by its path in the folder; None while some are not written.

        Raises StorageError if a file of any rank could not be written.
        """
        with writing(self.folder):
            if not self.writer.finish(wait):
                return None
            names = [file.relative_to(self.folder).as_posix() for file in self._files()]
            return digest_files(self.folder, names)

    def _files(self) -> list[Path]:
        own = [self.state_file]
        for part in self.parts:
            own += files_of_rank(self.folder / part, self.rank)
            if self.rank == 0:
                own += [file for file in (self.folder / part).iterdir() if not file.name.startswith("__")]
        return own


def begin_save(
    folder: Path,
    roles: Mapping[str, TrainedRole],
    pool: str,
    groups: TrainGroups,
    rollout_rng: RNGState | None,
    device: Device,
    references: Mapping[str, ReferenceCheckpoint] = MappingProxyType({}),
    beside_training: bool = False,
) -> UnfinishedSave:
    """Start writing every role to its folder in `folder`, and write this rank's own state; all ranks must call.

    references: that have moved, in another pool than the policy, by the policy's name.
    beside_training: write these in the background. Raises StorageError when a file of this rank could not be written.
    """
    writer = CheckpointWriter(device.torch_device)
    with writing(folder):
        for name, role in roles.items():
            role.checkpoint.save(folder / name, writer, role.config.checkpoint.async_save)
        for leader, reference in references.items():
            reference.save(reference_beside(folder / leader), writer, beside_training)
        save_rank_state(folder, pool, groups, rollout_rng)
    parts = (*roles, *(reference_beside(folder / leader).name for leader in references))
    return UnfinishedSave(folder, parts, rank_file(folder, pool, groups.rank), groups.rank, writer)


def rank_file(folder: Path, pool: str, rank: int) -> Path:
    """Path of a rank's own state in a checkpoint."""
    return folder / f"rng_{pool}_{rank:05d}.json"


def save_rank_state(folder: Path, pool: str, groups: TrainGroups, rollout_rng: RNGState | None) -> None:
    """Write the generators' states of this rank to its file."""
    rank_file(folder, pool, groups.rank).write_text(generators_text(groups, rollout_rng))


def generators_text(groups: TrainGroups, rollout_rng: RNGState | None) -> str:
    """States of the generators of training, of generation and of Megatron's regions, as JSON."""
    content = {
        "grid": dataclasses.asdict(groups.grid),
        "rank": groups.rank,
        "train": RNGState.capture().to_json(),
        "rollout": rollout_rng and rollout_rng.to_json(),
        "megatron": {name: to_hex(state) for name, state in get_cuda_rng_tracker().get_states().items()},
    }
    return json.dumps(content)


def load_rank_state(folder: Path, pool: str, groups: TrainGroups) -> tuple[bool, RNGState | None]:
    """Restore what `save_rank_state` wrote: (whether there was a state for this grid, the rollout's generators)."""
    file = rank_file(folder, pool, groups.rank)
    return restore_generators(file.read_text() if file.exists() else None, groups)


def restore_generators(text: str | None, groups: TrainGroups) -> tuple[bool, RNGState | None]:
    """Restore what `generators_text` gave: (whether it is of this rank of this grid, the rollout's generators)."""
    content: dict[str, Any] = {"grid": None} if text is None else json.loads(text)
    grid = content["grid"] and {"cp_size": 1} | content["grid"]  # checkpoints from before it was written have none
    if grid != dataclasses.asdict(groups.grid) or content["rank"] != groups.rank:
        return False, None
    RNGState.from_json(content["train"]).restore()
    get_cuda_rng_tracker().set_states({name: from_hex(text) for name, text in content["megatron"].items()})
    return True, content["rollout"] and RNGState.from_json(content["rollout"])
