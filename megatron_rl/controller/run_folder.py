"""The folder of a run: one writer at a time, and the checkpoint that the run goes on from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from megatron_rl.checkpoint.contents import RUN_FILE
from megatron_rl.checkpoint.folders import find, only_writer
from megatron_rl.checkpoint.resume import select
from megatron_rl.checkpoint.run_file import read_run_file, reading
from megatron_rl.checkpoint.storage import storing
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import PPO
from megatron_rl.errors import ConfigError
from megatron_rl.ledger.planner.file_rules import make_folders
from megatron_rl.ledger.planner.resume_rules import configured_models

LoadState = Callable[[dict[str, Any]], None]


class RunFolder:
    """Constructing it chooses the checkpoint to go on from; entering it takes the folder. Raises ConfigError.

    start: that checkpoint, or none. saved: what its run.json says; {} without one. models: the identities of the model
    folders that checkpoints of this run are of, as they were when it started.
    """

    def __init__(self, config: RunConfig) -> None:
        self._trainer = config.trainer
        self.path = Path(config.trainer.default_local_dir)
        self._found = find(self.path)
        self.models = configured_models(config)
        self.saved: dict[str, Any] = {}
        self._select()
        self._is_new = not self.path.exists()
        make_folders(config.trainer)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Raises ConfigError when another run is in the folder, StorageError when it cannot be written to."""
        with storing("the files of a run", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._open.enter_context(only_writer(self.path))
            # A run that was still ending may have saved one while this one started.
            if find(self.path) != self._found:
                self._select()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Give the folder up. A folder that this run made, and wrote nothing to before its model was refused, goes."""
        if self._is_new and isinstance(error, ConfigError) and not any(file.stat().st_size for file in self._files()):
            shutil.rmtree(self.path, ignore_errors=True)
        self._open.close()

    def _files(self) -> Iterator[Path]:
        return (file for file in self.path.rglob("*") if file.is_file())

    @property
    def resumed_step(self) -> int | None:
        """The step after which the run goes on; None for one that begins."""
        return None if self.start.path is None else self.start.step

    def give_back(self, load_state: LoadState) -> None:
        """Hand the saved state of the run, where there is one, to `load_state`."""
        if self.start.path is not None:
            with reading(self.start.path / RUN_FILE):
                load_state(self.saved["run"])

    def keep(self) -> bool:
        """Make the folder again where it has vanished; whether it had.

        Raises ConfigError where another run has taken it, StorageError where it cannot be made.
        """
        with storing("the files of a run", self.path):
            return self._lock.hold_again()

    def _select(self) -> None:
        self.start = select(self._trainer, self.models)
        self.saved = {} if self.start.path is None else read_run_file(self.start.path / RUN_FILE)
        if self.start.path is not None:
            with reading(self.start.path / RUN_FILE):
                stage = self.saved["config"]["trainer"].get("stage", PPO)
            if stage != self._trainer.stage:
                rule = f"{self.start.path} was saved by {stage}, and this is {self._trainer.stage}"
                raise ConfigError(f"cannot go on: {rule}; nearest: another trainer.default_local_dir")
