"""What a run notes of its repairs, without a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.cluster.signals import LastResort, StopRequest
from megatron_rl.config.load import load_config
from megatron_rl.controller.repairs import REPAIRS_FILE, Repair, Repairs

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def repaired() -> Repairs:
    """A run whose ranks are ready again after a loss in step 5."""
    config = load_config(REPOSITORY / "configs/demo_cpu.yaml", ["trainer.max_repairs=1"])
    last_resort = LastResort()
    last_resort.stand_down()
    repairs = Repairs(config, StopRequest(last_resort), local=False)
    repairs.took(4)
    repairs.all.append(Repair("rank 1 has died"))
    repairs._lost_at = repairs.started
    return repairs


def test_a_repair_is_a_line_and_metrics(repaired: Repairs, tmp_path: Path) -> None:
    """Four steps taken, and the copy of step 3 to go on from: one step is lost. The attempt after it notes nothing."""
    metrics = repaired.begun(3, "copy", tmp_path)
    (line,) = map(json.loads, (tmp_path / REPAIRS_FILE).read_text().splitlines())
    assert (line["number"], line["source"], line["step"], line["steps_lost"]) == (1, "copy", 3, 1)
    assert metrics == {"repair/number": 1, "repair/steps_lost": 1, "repair/seconds": line["seconds"]}
    assert repaired.begun(3, "copy", tmp_path) == {}


def test_a_repair_goes_on_without_its_line(repaired: Repairs, tmp_path: Path, capsys) -> None:
    """Where the file cannot be written a sentence says so. Would not catch a disk that fails later."""
    assert repaired.begun(3, "copy", tmp_path / "absent")["repair/number"] == 1
    assert "is missing repair 1: No such file or directory" in capsys.readouterr().out.replace("\n", "")
