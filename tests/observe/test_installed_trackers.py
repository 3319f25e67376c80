"""Trackers with their own packages, on this machine alone. One whose package is not installed is skipped by name.

OpenTelemetry's has a file of its own, test_step_spans.py.

None is a requirement of the project. They ran with trackio 0.43.0, swanlab 0.10.3 and clearml 2.1.12:

    pip install trackio swanlab clearml && python -m pytest tests/observe/test_installed_trackers.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.observe.services import TRACKERS

OFFLINE = {
    "WANDB_MODE": "offline",
    "SWANLAB_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
}
RUN = """
import sys
from pathlib import Path
from megatron_rl.observe.services import Services
services = Services.start([sys.argv[1]], "project", "name", {"trainer": {"seed": 1}}, Path.cwd())
warnings = services.log({"critic/score/mean": 0.5, "val-core/a/acc/mean@1": 1.0}, 1)
warnings += services.log_samples([{"input": "1+1=", "score": 1.0}, {"input": "2", "output": "x"}], 1)
warnings += services.log({"critic/score/mean": 0.75}, 2)
warnings += services.close()
sys.exit("; ".join(warnings) or 0)
"""


@pytest.mark.parametrize("name", [name for name in TRACKERS if name != "opentelemetry"])
def test_a_run_of_an_installed_package(name: str, tmp_path: Path) -> None:
    """Metrics of two steps and a table of answers, without a warning, and something is on the disk afterwards.

    Would not catch what the service's own page makes of them.
    """
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    home = {
        "HOME": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, name],
        cwd=tmp_path,
        env=os.environ | OFFLINE | home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) > 1000
