from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest
from command_line import REPOSITORY, CommandLine
from recorded_runs import RecordedRun, made_once, record, shared_folder
from stage_files import write_files

FEW = 40
VAL_FILES = "data.val_files="
ENOUGH = 1600
"""Questions for 100 steps of a small batch; a run reads and tokenises the 9000 of the demo in 0.8 s."""
TRAIN_FILES = "data.train_files="
SMALL_BATCHES = {"data.train_batch_size=8", "data.train_batch_size=16"}
DEMOS_OWN = REPOSITORY / "assets/demo/train.parquet"


@pytest.fixture(scope="session")
def few_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first of the demo's held-out prompts, and the first of those it learns from."""

    def write(folder: Path) -> None:
        for name, number in ((DEMOS_OWN.name, ENOUGH), ("test.parquet", FEW)):
            rows = pyarrow.parquet.read_table(DEMOS_OWN.with_name(name)).slice(0, number)
            pyarrow.parquet.write_table(rows, folder / name)

    return made_once(shared_folder(tmp_path_factory), "few_prompts", write)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tasks before PPO read (`stage_files.py`)."""
    return made_once(shared_folder(tmp_path_factory), "stage_files", lambda folder: write_files(folder) and None)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, few_prompts: Path) -> Callable[..., RecordedRun]:
    """Runs that are made once in a session, to be read: `recorded(name, *overrides)`, with `config` and `stage`."""

    def run(name: str, *overrides: str, **how: str) -> RecordedRun:
        return record(shared_folder(tmp_path_factory), name, with_few(few_prompts, overrides, **how), **how)

    return run


def learns_from_demo(config: str) -> bool:
    """Whether a configuration of ours names the demo's own questions."""
    return f"train_files: {DEMOS_OWN.relative_to(REPOSITORY)}\n" in (REPOSITORY / config).read_text()


def with_few(few_prompts: Path, overrides: tuple[str, ...], **how: object) -> tuple[str, ...]:
    """The overrides of a run of the project's own recipes, with few prompts.

    It is validated on `FEW`, as all 1000 take longer than a step, and learns from `ENOUGH` where its batches are small;
    unless overrides name a file.
    """
    config = str(how.get("config", "configs/demo_cpu.yaml"))
    if how.get("command") or not config.startswith("configs/"):
        return overrides
    if not any(one.startswith(VAL_FILES) for one in overrides):
        overrides = (f"{VAL_FILES}{few_prompts / 'test.parquet'}", *overrides)
    is_small = not SMALL_BATCHES.isdisjoint(overrides) and not any(one.startswith(TRAIN_FILES) for one in overrides)
    if is_small and learns_from_demo(config):
        overrides = (f"{TRAIN_FILES}{few_prompts / DEMOS_OWN.name}", *overrides)
    return overrides


@pytest.fixture
def command_line(tmp_path: Path, few_prompts: Path):
    """Start runs that are killed with everything they started when the test is over."""
    started: list[CommandLine] = []

    def start(*overrides: str, folder: Path | None = None, validates_all: bool = False, **how) -> CommandLine:
        """A run of its own, or the next life of the one in `folder`; `how`: keywords of CommandLine.

        validates_all: on all held-out prompts; otherwise as `with_few` says.
        """
        folder = folder or tmp_path / str(len(started))
        folder.mkdir(exist_ok=True)
        if validates_all:
            overrides = (f"{VAL_FILES}{DEMOS_OWN.with_name('test.parquet')}", *overrides)
        overrides = with_few(few_prompts, overrides, **how)
        started.append(CommandLine(folder, *overrides, **how))
        return started[-1]

    yield start
    for run in started:
        run.kill_all()
