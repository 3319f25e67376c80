"""A checkpoint that cannot be resumed is reported with everything else, before a process is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_folders import problems, write_model
from saved import save

from megatron_rl.config.schema import RunConfig
from megatron_rl.planner.resume_rules import configured_models


def test_a_folder_that_cannot_be_resumed(config, tmp_path):
    """A checkpoint of another vocabulary, among other found. Would not catch a damaged byte; the run itself does."""
    folder = save(Path(config.trainer.default_local_dir), 5)
    write_model(tmp_path / "model", vocab_size=99)
    config.trainer.total_training_steps = 0
    found = "\n".join(problems(config))
    assert found.startswith("trainer.total_training_steps=0 must be >= 1")
    assert f"{folder} cannot be resumed: it is of another model" in found


def test_a_checkpoint_of_the_same_models(config, monkeypatch):
    """Found good, by names and sizes. Would not catch a layout that cannot read it."""
    models = configured_models(config)
    assert models.keys() == {"actor", "critic"}
    monkeypatch.setattr("saved.MODELS", models)
    save(Path(config.trainer.default_local_dir), 5)
    assert problems(config) == []


@pytest.mark.parametrize(
    ("mode", "path", "expected"),
    [
        (
            "resume_path",
            "/none/global_step_3",
            "trainer.resume_from_path=/none/global_step_3 must be a checkpoint folder",
        ),
        ("resume_path", None, "the path is for resume_path, which needs it"),
        ("resume_path_", None, "trainer.resume_mode=resume_path_ must be one of"),
    ],
)
def test_what_is_asked_for_is_not_there(config: RunConfig, mode, path, expected):
    """Each is reported once. Would not catch a folder that goes between this check and the run."""
    config.trainer.resume_mode, config.trainer.resume_from_path = mode, path
    (problem,) = problems(config)
    assert expected in problem


def test_models_that_cannot_be_read_are_left_out(config, tmp_path):
    """Their own rules report them. Would not catch a config.json that is a list."""
    (tmp_path / "model/config.json").write_text("{")
    config.critic.model.path = str(tmp_path / "none")
    assert configured_models(config) == {}
