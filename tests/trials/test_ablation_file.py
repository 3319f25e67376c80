"""What an ablation's file may say, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.trials.ablation_file import RULES, AblationConfig, read_ablation

REPOSITORY = Path(__file__).parents[2]
TP = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "ablation.yaml"
    file.write_text(text)
    return file


def test_the_repository_has_one_that_is_right():
    """Its overrides, and one of the command line that wins. Would not catch a value that a run refuses."""
    ablation = read_ablation(REPOSITORY / "configs/ablation.yaml", ["trainer.total_training_steps=3", "data.seed=null"])
    assert ablation.overrides["trainer.total_training_steps"] == 3 and ablation.overrides["data.seed"] is None
    assert ablation.overrides["trainer.export_hf"] is False
    assert ablation.grid[TP] == [1, 2, 4]


def test_every_field_has_a_rule():
    """Would not catch a rule that lets everything pass."""
    assert set(RULES) == set(AblationConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("config: a.yaml\nfold: x", "unknown key fold .*did you mean: folder=x"),
        ("folder: x", "must name the base configuration"),
        ("config: a.yaml\ngrid: {" + TP + ": 2}", "must map dotted keys to lists of values"),
        ("config: a.yaml\ngrid: {" + TP + ": []}", "must map dotted keys to lists of values"),
        ("config: a.yaml\ngrid: {rollout.n: [1, 2]}", r"unknown key rollout.n .*actor_rollout_ref.rollout.n"),
        ("config: a.yaml\noverrides: {trainer.total_steps: 1}", "unknown key trainer.total_steps .*overrides of"),
        ("config: a.yaml\noverrides: {trainer: {seed: 1}}", "is a group of keys"),
        ("config: a.yaml\npoints: [{trainer.sed: 1}]", r"unknown key trainer.sed \(points\[0\]"),
        ("config: a.yaml\npoints: [{name: 3}]", "must be a text"),
        ("config: a.yaml\nexclude: [{trainer.sed: 1}]", r"unknown key trainer.sed \(exclude\[0\]"),
        ("config: a.yaml\noverrides: {trainer.default_local_dir: x}", "is set by the ablation: leave it out"),
        ("config: a.yaml\ntime_limit_s: 0", "time_limit_s=0 .*must be a number above 0"),
        ("config: a.yaml\nprompt_length: 1" + 400 * "0", "must be a number above 0 and at most"),
        ("config: a.yaml\nrepeats: 1000000000", "must be a whole number from 1 to 1000"),
        ("config: a.yaml\nwarmup_steps: true", "must be a whole number, 0 or more"),
        ("config: a.yaml\nbaseline: 3", "must be the name of a point"),
        ("[1]", "holds a list; it must hold keys"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path, text, says):
    """With the nearest right choice where there is one. Would not catch a fault of values, which preflight finds."""
    with pytest.raises(ConfigError, match=says):
        read_ablation(written(tmp_path, text))


def test_all_mistakes_come_at_once(tmp_path):
    """Two unknown keys are two problems. Would not catch more than one kind of fault, which comes kind by kind."""
    with pytest.raises(ConfigError) as refused:
        read_ablation(written(tmp_path, "config: a.yaml\noverrides: {trainer.sed: 1}\ngrid: {data.sed: [1]}"))
    assert [next(iter(violation.nearest)) for violation in refused.value.violations] == ["trainer.seed", "data.seed"]


def test_overrides_of_the_command_line_are_checked(tmp_path):
    """An unknown key, one that is the ablation's, and no '='. Would not catch a wrong value, which preflight finds."""
    file = written(tmp_path, "config: a.yaml")
    wrong = {"trainer.sed=1": "trainer.seed=1", "trainer.resume_mode=auto": "leave it out", "x": "'='"}
    for override, says in wrong.items():
        with pytest.raises(ConfigError, match=says):
            read_ablation(file, [override])


def test_no_file_at_all(tmp_path):
    """Would not catch a folder."""
    with pytest.raises(ConfigError, match=r"configs/ablation.yaml"):
        read_ablation(tmp_path / "absent.yaml")
