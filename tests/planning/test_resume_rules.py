"""A checkpoint that cannot be resumed is reported with everything else, before a process is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_folders import problems, safetensors, write_model
from saved import save

from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.resume_rules import configured_models


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


@pytest.mark.parametrize(("before", "now"), [("adam", "muon"), ("muon", "adam")])
def test_another_optimizer(config, monkeypatch, before: str, now: str) -> None:
    """Neither continues the other's moments. Would not catch other options of one optimizer, which may change."""
    config.critic.optim.optimizer = before
    monkeypatch.setattr("saved.MODELS", configured_models(config))
    save(Path(config.trainer.default_local_dir), 5)
    assert problems(config) == []
    config.critic.optim.optimizer = now
    (problem,) = problems(config)
    assert f"optimizer of the critic is {before}, and configured is {now}" in problem


@pytest.mark.parametrize(("before", "now"), [("frozen", "trained"), ("trained", "frozen")])
def test_another_use_of_the_vision_tower(config, monkeypatch, before: str, now: str) -> None:
    """Its weights would be missing, or those of the folder. Would not catch a tower in a run of text."""
    config.data.image_key = "images"
    for use in (before, now):
        config.actor_rollout_ref.actor.megatron.freeze_vision_model = use == "frozen"
        if use == before:
            monkeypatch.setattr("saved.MODELS", configured_models(config))
            save(Path(config.trainer.default_local_dir), 5)
    said = f"vision tower of the actor is {before}, and configured is {now}"
    assert [said in problem for problem in problems(config)].count(True) == 1


@pytest.mark.parametrize(
    ("changes", "file", "said"),
    [
        ({"rms_norm_eps": 1e-5}, None, "rms_norm_eps of the actor is 1e-06, and configured is 1e-05"),
        (
            {"rope_parameters": {"rope_theta": 5e5}},
            None,
            "rope_theta of the actor is 10000.0, and configured is 500000.0",
        ),
        ({"eos_token_id": [2, 7]}, None, "eos_token_id of the actor is [2], and configured is [2, 7]"),
        ({}, ("model.safetensors", safetensors(64)), "weights of the actor is"),
        ({}, ("tokenizer.json", b'{"model": {"vocab": {"a": 0}}}'), "tokenizer.json of the actor is"),
        ({}, ("merges.txt", b"a b"), "merges.txt of the actor is None"),
    ],
)
def test_another_model_of_the_same_shapes(config, tmp_path, monkeypatch, changes, file, said):
    """One thing changed in the folder after a checkpoint was written. Would not catch a few changed weights."""
    monkeypatch.setattr("saved.MODELS", configured_models(config))
    save(Path(config.trainer.default_local_dir), 5)
    folder = Path(write_model(tmp_path / "model", **changes))
    if file is not None:
        (folder / file[0]).write_bytes(file[1])
    (problem,) = problems(config)
    assert f"global_step_5 cannot be resumed: it is of another model: {said}" in problem


def test_the_same_model_elsewhere(config, tmp_path, monkeypatch):
    """A copy under another path, whose config.json a later transformers has written. Would not catch a renamed key."""
    monkeypatch.setattr("saved.MODELS", configured_models(config))
    save(Path(config.trainer.default_local_dir), 5)
    spelled = {"rope_parameters": None, "rope_theta": 10000, "rms_norm_eps": 1e-6, "transformers_version": "9"}
    config.actor_rollout_ref.model.path = write_model(tmp_path / "copy", **spelled)
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
    """Their own rules report them. Would not catch a folder that goes between this check and the run."""
    config.critic.model.path = str(tmp_path / "none")
    for content in ("{", "[1]", '{"architectures": 5}'):
        (tmp_path / "model/config.json").write_text(content)
        assert configured_models(config) == {}
