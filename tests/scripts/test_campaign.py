"""The campaign of strikes: what its table counts as a fault, and a short seeded form of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from campaigns.struck_runs import Outcome, differences
from sweeps import WEEKLY

REPOSITORY = Path(__file__).parents[2]


def written(folder: Path, lines: list[dict[str, float]], weights: bytes = b"w") -> Path:
    """What the comparison reads of a run."""
    (folder / "hf_model").mkdir(parents=True)
    (folder / "hf_model" / "model.safetensors").write_bytes(weights)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_what_differs_is_named(tmp_path: Path) -> None:
    """A number, a step that is missing, and weights; not clocks, nor metrics of repairs."""
    well = written(tmp_path / "well", [{"step": 1, "a": 1.0, "perf/x": 1.0}, {"step": 2, "a": 2.0}])
    same = written(
        tmp_path / "same", [{"step": 1, "a": 1.0, "perf/x": 9.0, "repair/seconds": 3.0}, {"step": 2, "a": 2.0}]
    )
    other = written(tmp_path / "other", [{"step": 1, "a": 1.5}], b"v")
    assert differences(same, well) == []
    assert differences(other, well) == ["1 a", "2 a", "2 step", "hf_model/model.safetensors"]


def test_the_row_of_a_kind() -> None:
    outcome = Outcome("rank", "demo", 3, Counter({3: 2, 1: 1}), [2.0, 9.0, 4.0], [0, 1, 0], unsaid=["code 1"])
    assert outcome.row() == "| rank | demo | 3 | 1 (1), 3 (2) | 4.0 | 9.0 | 1 | the same | 1 |"
    assert outcome.faults == ["code 1"]
    assert Outcome("port", "", skipped="no firewall").row() == "| port |  | 0 | skipped: no firewall | | | | | |"


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "kinds"),
    [
        ("4", ("ahead", "controller")),
        pytest.param("10", ("split", "reward", "stopped"), marks=WEEKLY),
        pytest.param("20", ("controller_split", "controller_ahead"), marks=WEEKLY),
        pytest.param("20", ("gcs", "gcs_split", "gcs_ahead", "raylet"), marks=WEEKLY),
        pytest.param("20", ("nodes", "disk", "sft"), marks=WEEKLY),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_a_short_campaign(kills: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Nothing is lost, nothing is left, and whoever ends says why; the table is printed."""
    command = [sys.executable, "scripts/campaign.py", "--kills", kills, "--seed", "5", "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, "--kinds", *kinds], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all("| the same | 0 |" in line or "skipped" in line for line in done.stdout.splitlines()[2:])
