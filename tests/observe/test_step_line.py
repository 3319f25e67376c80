"""The console's line of a step: what fits 100 columns, and the time that is left."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from rich.text import Text

from megatron_rl.observe.console import LOGGERS, silence_libraries
from megatron_rl.observe.step_line import FIELDS, TimeLeft, brief, step_line

RECORDED = json.loads((Path(__file__).parents[2] / "docs/demo_run.json").read_text())["metrics"]


def shown(*args) -> str:
    """A line as a terminal shows it."""
    return Text.from_markup(step_line(*args)).plain


def test_a_line_by_hand():
    """Would not catch a metric under another's label."""
    metrics = {"critic/score/mean": 0.61, "timing_s/step": 1.25, "actor/lr": 1.0}
    assert shown(metrics, 7, 20, 16.3) == "step  7/20  reward 0.610  1.2 s  16 s left"
    assert shown(metrics, 20, 20, 0.0) == "step 20/20  reward 0.610  1.2 s"
    assert shown({"val-core/demo/x/acc/mean@1": 0.3471}, 0, 5) == "step 0/5  held-out acc 0.347"
    two = {"val-core/a/acc/mean@1": 0.5, "val-core/b/reward/mean@1": 1.0, "val-core/b/reward/std": 2.0}
    assert shown(two, 3) == "step 3  a/acc/mean@1 0.500  b/reward/mean@1 1.000"


def test_recorded_steps_fit():
    """All lines of the demo, and one with every metric. Would not catch wide characters in the name of a source."""
    everything = {name: 123456.789 for name, _, _ in FIELDS} | {f"val-core/{i}/acc/mean@1": 0.5 for i in range(9)}
    for metrics in (*RECORDED, everything | {"step": 1, "timing_s/step": 1.0}):
        line = shown(metrics, metrics["step"], 20, 3000.0)
        assert len(line) <= 100 and line.endswith("50 min left")
        assert "reward" in line or metrics["step"] in (0, 1)


def test_steps_show_the_same_metrics():
    """Of the demo, with seconds and minutes left. Would not catch an order that says little."""
    steps = [
        metrics for metrics in RECORDED if "critic/score/mean" in metrics and not any("val-core" in m for m in metrics)
    ]
    lines = [shown(metrics, metrics["step"], 20, 7.0 * 9**number) for number, metrics in enumerate(steps[:3])]
    labels = [re.findall(r"  ([a-z_]+) ", line) for line in lines]
    assert labels[0] == labels[1] == labels[2] and {"reward", "entropy", "logp_diff"} <= set(labels[0])


def test_the_time_left_is_that_of_the_last_steps():
    """Steps of 10 s, then of 2 s. Would not catch a last validation that takes long."""
    now = iter([0.0, *(10.0 * step for step in range(1, 6)), *(50.0 + 2.0 * step for step in range(1, 16))])
    left = TimeLeft(20, clock=lambda: next(now))
    assert left.after(0) is None
    left.begin_step()
    assert [left.after(step) for step in range(1, 6)] == [10.0 * (20 - step) for step in range(1, 6)]
    assert [left.after(step) for step in range(6, 21)][-6:] == [2.0 * (20 - step) for step in range(15, 21)]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (3570, "1 h 00 min"), (7500, "2 h 05 min")]
)
def test_durations(seconds, text):
    """By hand. Would not catch days, which stay hours."""
    assert brief(seconds) == text


def test_only_listed_warnings_are_silenced():
    """Megatron's about a missing Apex is not shown, another of the same class is. Would not catch a reworded one."""
    with warnings.catch_warnings(record=True) as shown_ones:
        warnings.simplefilter("always")
        levels = {name: logging.getLogger(name).level for name in LOGGERS}
        silence_libraries()
        warnings.warn("Apex is not installed. Falling back to Torch Norm", UserWarning, stacklevel=1)
        warnings.warn("`torch.distributed.all_gather_into_tensor` is deprecated.", FutureWarning, stacklevel=1)
        again = "`load_state_dict` is deprecated and will be removed in future versions. Please use `load` instead."
        warnings.warn(again, FutureWarning, stacklevel=1)
        warnings.warn("this layer is broken", UserWarning, stacklevel=1)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    assert [str(one.message) for one in shown_ones] == ["this layer is broken"]


@pytest.mark.slow
def test_megatron_is_imported_without_a_word():
    """The modules whose warnings a run showed. Would not catch a warning of a call."""
    modules = "megatron.core.optimizer, megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision"
    lines = f"from megatron_rl.observe.console import silence_libraries\nsilence_libraries()\nimport {modules}"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("", "")
