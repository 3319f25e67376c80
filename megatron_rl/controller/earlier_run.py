"""The files of an earlier run in the folder of a new one: they are set aside, as checkpoints are, and never replaced.

FOLDER/run.set_aside/     metrics.jsonl, samples/, hf_model/ ... of the earlier run; `run.set_aside.2` is the next one
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.checkpoint.folders import HF_MODEL, move_aside
from megatron_rl.cluster.heartbeat_monitor import STACKS_FILE
from megatron_rl.config.load import flat_settings
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.controller.repairs import REPAIRS_FILE
from megatron_rl.errors import ConfigError
from megatron_rl.observe.loggers import METRICS_FILE
from megatron_rl.observe.phase_clock import TIMELINE_FILE
from megatron_rl.observe.sample_files import SAMPLES_FOLDER
from megatron_rl.observe.summary import PLAN_FILE
from megatron_rl.sampling.journal import SCHEDULE_FILE
from megatron_rl.user_code.first_prints import PRINTS_FILE

RESULTS = (METRICS_FILE, "summary.json", SAMPLES_FOLDER, "val_generations", HF_MODEL, "adapter")
"""What an earlier run has left if it has come to something."""
OTHERS = (
    *("tensorboard", "curves.png", TIMELINE_FILE, "timeline.png", "calibration.json", "calibration.png", "view.html"),
    *(PLAN_FILE, REPAIRS_FILE, SCHEDULE_FILE, STACKS_FILE, PRINTS_FILE),
)
"""What belongs to its results. Files of other names are the user's, and stay."""
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
