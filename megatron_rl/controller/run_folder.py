"""The folder of a run: one writer at a time, and the checkpoint that the run resumes.

The files of an earlier run in the folder of a new one are set aside, as checkpoints are, and never replaced:

FOLDER/run.set_aside/     metrics.jsonl, samples/, hf_model/ ... of the earlier run; `run.set_aside.2` is the next one
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from megatron_rl.checkpoint.contents import RUN_FILE
from megatron_rl.checkpoint.folders import HF_MODEL, find, move_aside, only_writer
from megatron_rl.checkpoint.model_folder import model_folders
from megatron_rl.checkpoint.resume import ResumePoint, select
from megatron_rl.checkpoint.run_file import read_run_file, reading
from megatron_rl.checkpoint.storage import storing
from megatron_rl.cluster.heartbeat import STACKS_FILE
from megatron_rl.config.load import flat_settings
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import PPO
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.controller.repairs import REPAIRS_FILE, KeptCopy, Repairs
from megatron_rl.data.turn_images import FOLDER
from megatron_rl.errors import ConfigError
from megatron_rl.observe.loggers import METRICS_FILE
from megatron_rl.observe.phase_clock import TIMELINE_FILE
from megatron_rl.observe.sample_files import SAMPLES_FOLDER
from megatron_rl.observe.summary import PLAN_FILE
from megatron_rl.planning.file_rules import make_folders
from megatron_rl.planning.resume_rules import configured_models
from megatron_rl.sampling.journal import SCHEDULE_FILE
from megatron_rl.user_code.first_prints import PRINTS_FILE

LoadState = Callable[[dict[str, Any]], None]


class RunFolder:
    """The constructor chooses the checkpoint to resume, entering claims the folder. Raises ConfigError.

    repairs: of a run whose ranks may have been started before. copy: the copy in host memory that the run resumes from,
    if it does. start: the checkpoint to resume, or the controller's part of that copy. saved: content of its run.json;
    {} for a new run. model_folders: that roles start from. models: role -> identity of its model folder when the run
    started, for the manifests of its checkpoints. set_aside: where the files of an earlier run are now that a new run
    has found; None: there were none.
    """

    def __init__(self, config: RunConfig, repairs: Repairs | None = None) -> None:
        self._config, self._trainer, self._repairs = config, config.trainer, repairs
        self.set_aside: Path | None = None
        self.copy: KeptCopy | None = None
        self.path = Path(config.trainer.default_local_dir)
        self._found = find(self.path)
        self.model_folders = model_folders(config) if repairs is None else repairs.folders
        self.models = configured_models(config, self.model_folders)
        self.saved: dict[str, Any] = {}
        self._select()
        self._is_new = not self.path.exists()
        make_folders(config.trainer)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Raises ConfigError when another run is in the folder, and where this run reads a file that it would set
        aside, StorageError when the folder cannot be written to.
        """
        with storing("the files of a run", self.path), ExitStack() as opened:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = opened.enter_context(only_writer(self.path))
            # An earlier run that was still ending may have saved one in the meantime.
            if find(self.path) != self._found:
                self._select()
            if self._begins_anew():
                self.set_aside = set_earlier_run_aside(self._config)
            self._open = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Release the folder. Delete it if this run made it and ended with ConfigError before it wrote anything."""
        if self._is_new and isinstance(error, ConfigError) and not any(file.stat().st_size for file in self._files()):
            shutil.rmtree(self.path, ignore_errors=True)
        self._open.close()

    def _files(self) -> Iterator[Path]:
        return (file for file in self.path.rglob("*") if file.is_file())

    def _begins_anew(self) -> bool:
        """Whether this is a new run: it resumes nothing, and is no repair of one, and no evaluation."""
        return self.start.path is None and not self.is_repair and not self._trainer.val_only

    @property
    def is_repair(self) -> bool:
        """Whether an earlier attempt of this process was in the folder."""
        return self._repairs is not None and self._repairs.attempt > 0

    @property
    def resumed_step(self) -> int | None:
        """The step after which the run resumes; None for a new run."""
        return None if self.start.path is None else self.start.step

    @property
    def is_finished(self) -> bool:
        """Whether the run resumes after its last step, so that it trains nothing. Raises ValueError before the prompts
        are counted.
        """
        return self.start.path is not None and not self._trainer.val_only and self.start.step >= self._trainer.num_steps

    def keeps(self, name: str) -> bool:
        """Whether the record `name` stays as it is: it tells of the steps of a run that is finished in this folder."""
        if not self.is_finished or self.start.path is None:
            return False
        is_own = self.copy is not None or self.start.path.resolve().parent == self.path.resolve()
        return is_own and (self.path / name).is_file()

    def give_back(self, load_state: LoadState) -> None:
        """Pass the saved state of the run to `load_state`; a new run has none."""
        if self.start.path is not None:
            with reading(self.start.path / RUN_FILE):
                load_state(self.saved["run"])

    def keep(self) -> bool:
        """Make the folder again if it was deleted; returns whether it was.

        Raises ConfigError if another run has claimed it, StorageError if it cannot be made.
        """
        with storing("the files of a run", self.path):
            return self._lock.hold_again()

    @property
    def source(self) -> str:
        """What the run resumes from: copy | checkpoint | start."""
        if self.copy is not None:
            return "copy"
        return "start" if self.start.path is None else "checkpoint"

    def _select(self) -> None:
        self.start, self.copy = self._selected()
        self.saved = {} if self.start.path is None else read_run_file(self.start.path / RUN_FILE)
        if self.start.path is not None:
            with reading(self.start.path / RUN_FILE):
                task = self.saved["config"]["trainer"].get("stage", PPO)
            if task != self._trainer.stage:
                rule = f"{self.start.path} was saved by {task}, and this is {self._trainer.stage}"
                raise ConfigError(f"cannot resume: {rule}; try: another trainer.default_local_dir")

    def _selected(self) -> tuple[ResumePoint, KeptCopy | None]:
        """After a repair, the newest of the checkpoints and copies; without any, what the first attempt began with."""
        if self._repairs is None or not self._repairs.attempt:
            return select(self._trainer, self.models), None
        trainer = replace(self._trainer, resume_mode="auto") if find(self.path) else self._trainer
        start, kept = select(trainer, self.models), self._repairs.kept
        if kept is not None and kept.step > start.step:
            return ResumePoint(kept.folder, kept.step), kept
        return start, None


RESULTS = (METRICS_FILE, "summary.json", SAMPLES_FOLDER, "val_generations", HF_MODEL, "adapter")
"""What an earlier run has left if it has come to something."""
OTHERS = (
    *("tensorboard", "curves.png", TIMELINE_FILE, "timeline.png", "calibration.json", "calibration.png", "view.html"),
    *(PLAN_FILE, REPAIRS_FILE, SCHEDULE_FILE, FOLDER, STACKS_FILE, PRINTS_FILE),
)
"""Files of its results. Files with other names are the user's, and stay."""
WRITTEN = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
"""Keys of folders that a run writes to."""


def set_earlier_run_aside(config: RunConfig) -> Path | None:
    """Move the files of an earlier run into a folder beside its checkpoints; returns that folder, None without any.

    Raises ConfigError where the new run reads one of these files, OSError.
    """
    root = Path(config.trainer.default_local_dir)
    tables = [name for name in _tables_in(config.trainer) if (root / name).is_dir()]
    if not any(_has_content(root / name) for name in (*RESULTS, *tables)):
        return None
    names = [name for name in (*RESULTS, *OTHERS, *tables) if (root / name).exists()]
    read = next(_read_inside(config, [root / name for name in names]), None)
    if read is not None:
        rule = f"is a file of the run that trainer.default_local_dir={root} holds, which a new run would replace"
        raise ConfigError(f"{read} {rule}; try: trainer.default_local_dir={root}-2")
    return move_aside(root, names, "run")


def _tables_in(trainer: TrainerConfig) -> Iterator[str]:
    """Names of the folders right below the run's own where it writes tables of responses."""
    root = Path(trainer.default_local_dir).resolve()
    for given in (trainer.rollout_data_dir, trainer.validation_data_dir):
        if given is not None and Path(given).resolve().parent == root:
            yield Path(given).name


def _has_content(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir()) or path.is_file() and path.stat().st_size > 0


def _read_inside(config: RunConfig, moved: list[Path]) -> Iterator[str]:
    """Settings, as KEY=VALUE, whose value is one of these files or folders, or lies in one."""
    whole = [path.resolve() for path in moved]
    for key, value in flat_settings(dataclasses.asdict(config)).items():
        for one in value if isinstance(value, list) else [value]:
            if key not in WRITTEN and isinstance(one, str) and "/" in one:
                path = Path(one).resolve()
                if any(path.is_relative_to(folder) for folder in whole):
                    yield f"{key}={one}"
