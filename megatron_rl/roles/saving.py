"""One rank's side of a checkpoint that is being written: what it started, and which files it answers for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.checkpoint.manifest import FileRecord, digest_files
from megatron_rl.checkpoint.sharded_files import CheckpointWriter
from megatron_rl.checkpoint.storage import writing
from megatron_rl.device import Device
from megatron_rl.hybrid_engine.rng import RNGState
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.roles.rank_state import rank_file, save_rank_state
from megatron_rl.roles.role import TrainedRole


@dataclass(frozen=True)
class UnfinishedSave:
    """A save under way. All ranks must call `finish` together."""

    folder: Path
    roles: tuple[str, ...]
    state_file: Path
    rank: int
    writer: CheckpointWriter

    def finish(self, wait: bool) -> dict[str, FileRecord] | None:
        """Size and checksum of each file of this rank, by its path in the folder; None while some are not written.

        Raises StorageError when a file could not be written, if it is another rank's, too.
        """
        with writing(self.folder):
            if not self.writer.finish(wait):
                return None
            names = [file.relative_to(self.folder).as_posix() for file in self._files()]
            return digest_files(self.folder, names)

    def _files(self) -> list[Path]:
        own = [self.state_file]
        for role in self.roles:
            own += (self.folder / role).glob(f"__{self.rank}_*")
            if self.rank == 0:
                own += [file for file in (self.folder / role).iterdir() if not file.name.startswith("__")]
        return own


def begin_save(
    folder: Path,
    roles: Mapping[str, TrainedRole],
    pool: str,
    groups: TrainGroups,
    rollout_rng: RNGState | None,
    device: Device,
) -> UnfinishedSave:
    """Write every role to its folder in `folder`, and this rank's own state beside them; all ranks of a pool must call.

    Raises StorageError when a file of this rank could not be written.
    """
    writer = CheckpointWriter(device.torch_device)
    with writing(folder):
        for name, role in roles.items():
            role.checkpoint.save(folder / name, writer, role.config.checkpoint.async_save)
        save_rank_state(folder, pool, groups, rollout_rng)
    return UnfinishedSave(folder, tuple(roles), rank_file(folder, pool, groups.rank), groups.rank, writer)
