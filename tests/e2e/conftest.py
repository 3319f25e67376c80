from __future__ import annotations

from pathlib import Path

import pytest
from command_line import REPOSITORY, CommandLine


@pytest.fixture
def command_line(tmp_path: Path):
    """Start runs that are killed with everything they started when the test is over."""
    if not (REPOSITORY / "assets/demo/assets.json").exists():
        pytest.fail("the demo assets are missing: run `make assets` (make test does)")
    started: list[CommandLine] = []

    def start(*overrides: str, folder: Path | None = None, **how) -> CommandLine:
        """A run of its own, or the next life of the one in `folder`; `how`: keywords of CommandLine."""
        folder = folder or tmp_path / str(len(started))
        folder.mkdir(exist_ok=True)
        started.append(CommandLine(folder, *overrides, **how))
        return started[-1]

    yield start
    for run in started:
        run.kill_all()
