from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest
from command_line import REPOSITORY, CommandLine

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
    if not (REPOSITORY / "assets/demo/assets.json").exists():
        pytest.fail("the demo assets are missing: run `make assets` (make test does)")
    folder = tmp_path_factory.mktemp("few")
    for name, number in ((DEMOS_OWN.name, ENOUGH), ("test.parquet", FEW)):
        rows = pyarrow.parquet.read_table(DEMOS_OWN.with_name(name)).slice(0, number)
        pyarrow.parquet.write_table(rows, folder / name)
    return folder


def learns_from_demo(config: str) -> bool:
    """Whether a configuration of ours names the demo's own questions."""
    return f"train_files: {DEMOS_OWN.relative_to(REPOSITORY)}\n" in (REPOSITORY / config).read_text()


@pytest.fixture
def command_line(tmp_path: Path, few_prompts: Path):
    """Start runs that are killed with everything they started when the test is over."""
    started: list[CommandLine] = []

    def start(*overrides: str, folder: Path | None = None, validates_all: bool = False, **how) -> CommandLine:
        """A run of its own, or the next life of the one in `folder`; `how`: keywords of CommandLine.

        Runs of the project's own recipes are validated on `FEW` prompts, as all 1000 take longer than a step, and
        learn from `ENOUGH` where their batches are small; unless overrides name a file or the run `validates_all`.
        """
        folder = folder or tmp_path / str(len(started))
        folder.mkdir(exist_ok=True)
        config = how.get("config", "configs/demo_cpu.yaml")
        is_ours = not how.get("command") and config.startswith("configs/") and not validates_all
        if is_ours and not any(one.startswith(VAL_FILES) for one in overrides):
            overrides = (f"{VAL_FILES}{few_prompts / 'test.parquet'}", *overrides)
        is_small = not SMALL_BATCHES.isdisjoint(overrides) and not any(one.startswith(TRAIN_FILES) for one in overrides)
        if is_ours and is_small and learns_from_demo(config):
            overrides = (f"{TRAIN_FILES}{few_prompts / DEMOS_OWN.name}", *overrides)
        started.append(CommandLine(folder, *overrides, **how))
        return started[-1]

    yield start
    for run in started:
        run.kill_all()
