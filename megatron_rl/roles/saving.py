"""One rank's side of a checkpoint that is being written: what it started, and which files it answers for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.checkpoint.manifest import FileRecord, digest_files
from megatron_rl.checkpoint.sharded_files import CheckpointWriter
from megatron_rl.checkpoint.storage import writing
from megatron_rl.hybrid_engine.rng import RNGState
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.roles.rank_state import rank_file, save_rank_state
from megatron_rl.roles.role_checkpoint import RoleCheckpoint


@dataclass(frozen=True)
class UnfinishedSave:
    """A save under way. All ranks must call `finish` together."""

    folder: Path
    roles: tuple[str, ...]
    rank: int
    writer: CheckpointWriter

    def finish(self, wait: bool) -> dict[str, FileRecord] | None:
        """Size and checksum of each file of this rank, by its path in the folder; None while some are not written.

        Raises StorageError when a file could not be written, if it is another rank's, too.
        """
        with writing():
            if not self.writer.finish(wait):
                return None
            names = [file.relative_to(self.folder).as_posix() for file in self._files()]
            return digest_files(self.folder, names)

    def _files(self) -> list[Path]:
        own = [rank_file(self.folder, self.rank)]
        for role in self.roles:
            own += (self.folder / role).glob(f"__{self.rank}_*")
            if self.rank == 0:
                own += [file for file in (self.folder / role).iterdir() if not file.name.startswith("__")]
        return own


def begin_save(
    folder: Path,
    checkpoints: Mapping[str, RoleCheckpoint],
    beside_training: Mapping[str, bool],
    groups: TrainGroups,
    rollout_rng: RNGState | None,
    device: torch.device,
) -> UnfinishedSave:
    """Write every role to its folder in `folder` and this rank's own state beside them; all ranks must call.

    Raises StorageError when a file of this rank could not be written.
    """
    writer = CheckpointWriter(device)
    with writing():
        for name, checkpoint in checkpoints.items():
            checkpoint.save(folder / name, writer, beside_training[name])
        save_rank_state(folder, groups, rollout_rng)
    return UnfinishedSave(folder, tuple(checkpoints), groups.rank, writer)
