"""scripts/nightly.sh on one rank: a golden pass with a preemption, and an injected regression and hang."""

from __future__ import annotations

import sys

import pytest
from short_runs import ONE, SHORT, WITHOUT_RAY

from megatron_rl.trials.golden import Band, Golden, write_golden
from megatron_rl.trials.trial import read_metrics

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(480)]

SCORES = {"critic/score/mean": Band((0.6, 0.6), below=0.3), "actor/skipped_updates": Band((0.0, 0.0), above=0.0)}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    {body}
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def nightly(command_line, tmp_path):
    """Start the script; `body` begins its reward function; the golden file is for two steps."""

    def start(body: str = "pass", stop_after_step: int = 0):
        golden, reward = tmp_path / "golden.json", tmp_path / "reward.py"
        write_golden(Golden(2, stop_after_step, 200.0, 120.0, SCORES), golden)
        reward.write_text(REWARD.format(body=body))
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


@pytest.mark.weekly
def test_injected_regression_has_its_code(nightly, tmp_path) -> None:
    """A reward that is always 0. Nothing is left running.

    test_ablation.py has a run that crashes; `make test` has the verdicts and the watch on a process, which may stand
    still, in tests/trials. Would not catch a regression inside the bands.
    """
    run = nightly("return 0.0")
    assert run.wait() == 10, run.text()
    assert "| critic/score/mean | 1 | 0 | 0.6 | 0.3 to inf | **out** |" in report(tmp_path)
    assert run.left_over() == []
