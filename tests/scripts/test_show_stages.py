"""scripts/show_stages.py, and the files of `make demo-rlhf`, which it reads the results of."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from megatron_rl.config.load import load_config

REPOSITORY = Path(__file__).parents[2]
ACC, SCORE = "val-core/demo/addition/acc/mean@1", "val-aux/demo/addition/rm_score/mean@1"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    try:
        yield importlib.import_module("show_stages")
    finally:
        sys.path.remove(str(REPOSITORY / "scripts"))


def logged(*validated: tuple[int, float, float]) -> dict[int, dict[str, float]]:
    """A step of training between any two validations."""
    metrics = {step: {ACC: accuracy, SCORE: score} for step, accuracy, score in validated}
    for step, _, _ in validated:
        metrics[step + 1] = {"reward/rm_score/mean": 0.5, "actor/reward_kl_penalty": 0.01}
    return metrics


def test_validations_are_found_in_order(script):
    """Steps without one are left out. Would not catch a second data source, of which the demo has none."""
    found = script.validations(logged((4, 0.5, 1.0), (0, 0.25, -1.0)))
    assert found == [script.Point(0, 0.25, -1.0), script.Point(4, 0.5, 1.0)]
    with pytest.raises(ValueError, match=r"acc/mean@1 and .*rm_score/mean@1"):
        script.validations({1: {"reward/rm_score/mean": 0.5}})


@pytest.mark.parametrize(
    ("validated", "expected"),
    [
        ([(0, 0.3, -1.0), (4, 0.9, 2.0)], "from -1.00 to 2.00: no over-optimisation"),
        ([(0, 0.3, -1.0), (4, 0.905, 2.0), (8, 0.9, 3.0)], "to 3.00: no over-optimisation"),
        ([(0, 0.3, -1.0), (4, 0.9, 2.0), (8, 0.7, 3.0)], "been 0.900 at step 4, with a mean score of 2.00: over-opt"),
        ([(0, 0.3, -1.0), (4, 0.9, 2.0), (8, 0.7, 1.0)], "with a mean score of 2.00: worse, and the score says so"),
    ],
)
def test_over_optimisation_is_a_score_that_rises_while_the_accuracy_falls(script, validated, expected):
    """By hand, with a fall that is within the tolerance. Would not catch a peak between two validations."""
    assert expected in script.verdict(script.validations(logged(*validated)))


def test_the_table_and_the_picture(script, tmp_path, capsys):
    """Every figure stands in its stage's row; a stage that has not finished is named. Would not catch a bad look."""
    summaries = {
        "sft": {"steps": 400, "wall_s": 101.4},
        "reward": {"steps": 562, "wall_s": 202.0, "val_last": {"val/accuracy": 0.9712}},
        "ppo": {"steps": 8, "wall_s": 303.0},
    }
    for name, summary in summaries.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    steps = logged((0, 0.34, -1), (4, 0.9, 2), (8, 0.8, 3)).items()
    (tmp_path / "ppo/metrics.jsonl").write_text(
        "\n".join(json.dumps({"step": step} | values) for step, values in steps)
    )
    script.main([str(tmp_path)])
    rows = [line.replace("\u2502", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["sft", "400", "101", "0.340", "-1.00"] in rows and ["reward", "562", "202", "0.971"] in rows
    assert ["step", "4", "0.900", "2.00"] in rows and ["ppo", "8", "303", "0.800", "3.00"] in rows
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "reward/summary.json").unlink()
    with pytest.raises(SystemExit):
        script.main([str(tmp_path)])
    assert "reward has no summary.json: this stage has not finished" in capsys.readouterr().err


def test_each_stage_starts_from_what_the_one_before_left():
    """The folders in the three files, and that training never asks the rule. Would not catch a rule that another file
    hides in the data; tests/e2e/test_demo_rlhf.py looks at the samples."""
    sft, reward, ppo = (
        load_config(REPOSITORY / f"configs/stages/{name}_cpu.yaml") for name in ("sft", "reward", "rlhf")
    )
    tuned, judge = (f"{config.trainer.default_local_dir}/hf_model" for config in (sft, reward))
    assert reward.critic.model.path == ppo.actor_rollout_ref.model.path == tuned
    assert ppo.reward_model.model.path == judge and ppo.reward_model.enable
    assert ppo.custom_reward_function.validation_only
    made = (REPOSITORY / "Makefile").read_text()
    for config, name in ((sft, "sft"), (reward, "reward"), (ppo, "ppo")):
        assert config.trainer.default_local_dir == f"outputs/demo_rlhf/{name}"
        assert f"test -e $(RLHF)/{name}/summary.json || exec " in made and config.trainer.save_freq > 0
