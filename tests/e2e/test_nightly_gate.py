"""scripts/nightly.sh on one rank: a golden pass with a preemption, and an injected regression and hang."""

from __future__ import annotations

import sys

import pytest
from short_runs import ONE, SHORT, WITHOUT_RAY

from megatron_rl.trials.golden import Band, Golden, write_golden
from megatron_rl.trials.metrics_file import read_metrics

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(480)]

SCORES = {"critic/score/mean": Band((0.6, 0.6), below=0.3), "actor/skipped_updates": Band((0.0, 0.0), above=0.0)}
REWARD = """
import pathlib, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    {body}
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def nightly(command_line, tmp_path):
    """Start the script; `body` goes into its reward function; the golden file is for two steps."""

    def start(body: str = "pass", stop_after_step: int = 0, step_within_s: float = 120.0):
        golden, reward = tmp_path / "golden.json", tmp_path / "reward.py"
        write_golden(Golden(2, stop_after_step, 200.0, step_within_s, SCORES), golden)
        reward.write_text(REWARD.format(body=body.format(metrics=repr(str(tmp_path / "night/run/metrics.jsonl")))))
        variables = {"PYTHON": sys.executable, "GOLDEN": str(golden), "FOLDER": str(tmp_path / "night")}
        keys = (*SHORT, *ONE, WITHOUT_RAY, f"custom_reward_function.path={reward}", "reward_model.timeout_s=600")
        script = ("bash", "scripts/nightly.sh")
        return command_line(*keys, "trainer.export_hf=false", command=script, variables=variables)

    return start


def report(tmp_path) -> str:
    return (tmp_path / "night/report.md").read_text()


def test_golden_pass_after_a_preemption(nightly, tmp_path) -> None:
    """Code 0, with a first life that saved after SIGTERM. Would not catch a run that passes by luck of wide bands."""
    run = nightly(stop_after_step=1)
    assert run.wait() == 0, run.text()
    assert report(tmp_path).startswith("# Nightly: pass (exit code 0)")
    assert "SIGTERM, then exit code 2" in report(tmp_path)
    assert sorted(read_metrics(tmp_path / "night/run/metrics.jsonl")) == [1, 2]
    assert run.left_over() == []


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("return 0.0", 10, "| critic/score/mean | 1 | 0 | 0.6 | 0.3 to inf | **out** |"),
        (
            "pathlib.Path({metrics}).is_file() and pathlib.Path({metrics}).read_text() and time.sleep(600)",
            12,
            "s without a step",
        ),
    ],
    ids=["regression", "hang"],
)
def test_injected_fault_has_its_code(nightly, tmp_path, body: str, code: int, says: str) -> None:
    """A reward that is always 0, one that sleeps in step 2. Nothing is left running.

    test_ablation.py has a run that crashes; `make test` has the verdicts and the watch on a process in tests/trials.
    Would not catch a hang before the first step other than by the longer limit, which is the same code.
    """
    run = nightly(body, step_within_s=10.0 if code == 12 else 120.0)
    assert run.wait() == code, run.text()
    assert says in report(tmp_path)
    assert run.left_over() == []
