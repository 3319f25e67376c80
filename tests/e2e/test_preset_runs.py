"""The demo with each preset, on two data-parallel ranks."""

from __future__ import annotations

import json

import pytest
from short_runs import MEGATRON, SHORT, WITHOUT_RAY, metrics

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(300)]

SCHEDULING = "actor_rollout_ref.rollout.async_scheduling"
TWO = (
    *SHORT,
    WITHOUT_RAY,
    "trainer.n_gpus_per_node=2",
    *(f"{MEGATRON}.{axis}_model_parallel_size=1" for axis in ("tensor", "pipeline")),
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "trainer.total_training_steps=3",
)


def test_the_demo_with_each_preset(command_line, tmp_path) -> None:
    """All metrics but clocks: reproducible gives the bits of no preset, fast rounds sums in another order. The run
    names the keys that it leaves out.

    Would not catch rounding on GPUs.
    """
    found = {}
    for preset in ("null", "fast", "reproducible"):
        run = command_line(*TWO, f"trainer.preset={preset}", folder=tmp_path / preset)
        assert run.wait() == 0, run.text()
        found[preset] = metrics(run)
        missing = "preset fast without actor_rollout_ref.rollout.disable_custom_all_reduce=false" in run.text()
        assert missing == (preset == "fast")
        plan = json.loads((run.run / "plan.json").read_text())["plan"]
        assert preset == "null" or plan["preset"]["sets"][SCHEDULING] is (preset == "fast")
    assert len(found["null"]) == 3 and found["reproducible"] == found["null"]
    for step, plain in found["null"].items():
        assert found["fast"][step] == pytest.approx(plain, rel=1e-3, abs=2e-5)
