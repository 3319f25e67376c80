from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest
from command_line import REPOSITORY, CommandLine

FEW = 40
VAL_FILES = "data.val_files="


@pytest.fixture(scope="session")
def few_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of the demo's held-out prompts."""
    if not (REPOSITORY / "assets/demo/assets.json").exists():
        pytest.fail("the demo assets are missing: run `make assets` (make test does)")
    file = tmp_path_factory.mktemp("few") / "test.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(REPOSITORY / "assets/demo/test.parquet").slice(0, FEW), file)
    return file


@pytest.fixture
def command_line(tmp_path: Path, few_prompts: Path):
    """Start runs that are killed with everything they started when the test is over."""
    started: list[CommandLine] = []

    def start(*overrides: str, folder: Path | None = None, validates_all: bool = False, **how) -> CommandLine:
        """A run of its own, or the next life of the one in `folder`; `how`: keywords of CommandLine.

        Runs of the project's own recipes are validated on `FEW` prompts, as all 1000 take longer than a step; unless
        overrides name a file or the run `validates_all`.
        """
        folder = folder or tmp_path / str(len(started))
        folder.mkdir(exist_ok=True)
        is_ours = not how.get("command") and how.get("config", "configs/").startswith("configs/")
        if is_ours and not validates_all and not any(one.startswith(VAL_FILES) for one in overrides):
            overrides = (f"{VAL_FILES}{few_prompts}", *overrides)
        started.append(CommandLine(folder, *overrides, **how))
        return started[-1]

    yield start
    for run in started:
        run.kill_all()
