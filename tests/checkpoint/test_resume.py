"""Which checkpoint a run goes on from: the newest good one, and otherwise a reason and a way out."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
from saved import FILES, MODELS, SETTINGS, save, write_files

from megatron_rl.checkpoint.folders import commit, set_aside, step_folder
from megatron_rl.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    digest_files,
    model_identity,
    read_manifest,
    write_manifest,
)
from megatron_rl.checkpoint.resume import ResumePoint, _differences, select, usable_checkpoint
from megatron_rl.cli.evaluating import export_name, model_folder
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.errors import ConfigError

NOTHING = ResumePoint(None, 0)


@pytest.fixture
def trainer(tmp_path: Path) -> TrainerConfig:
    return TrainerConfig(default_local_dir=str(tmp_path))


def at(path: Path | str) -> TrainerConfig:
    return TrainerConfig(resume_mode="resume_path", resume_from_path=str(path))


def damage(root: Path, step: int, how: str) -> None:
    folder = step_folder(root, step)
    if how == "no manifest":
        (folder / MANIFEST).unlink()
    elif how == "torn manifest":
        os.truncate(folder / MANIFEST, 30)
    elif how == "deep manifest":
        (folder / MANIFEST).write_text("[" * 100_000)
    elif how == "missing":
        (folder / FILES[0]).unlink()
    elif how == "cut":
        os.truncate(folder / FILES[1], 3)
    elif how == "flipped":
        content = bytearray((folder / FILES[2]).read_bytes())
        content[5] ^= 1
        (folder / FILES[2]).write_bytes(content)
    elif how == "renamed":
        folder.rename(step_folder(root, step + 100))


def save_changed(root: Path, step: int, **changes) -> Path:
    """A complete checkpoint of a model with other settings."""
    folder, manifest = write_files(root, step)
    models = MODELS | {"critic": model_identity(SETTINGS | changes)}
    return commit(folder, Manifest(manifest.format, step, models, manifest.files))


def save_pickle(root: Path, step: int, content: bytes) -> Path:
    """A complete checkpoint with a table of contents."""
    folder, manifest = write_files(root, step)
    (folder / "actor/.metadata").write_bytes(content)
    files = manifest.files | digest_files(folder, ["actor/.metadata"])
    return commit(folder, Manifest(manifest.format, step, MODELS, files))


def test_the_newest_one_is_taken(trainer, tmp_path):
    """By number, not by name or time. Would not catch a folder whose manifest lies."""
    assert select(trainer, MODELS) == NOTHING
    for step in (9, 10, 2):
        save(tmp_path, step)
    assert select(trainer, MODELS) == ResumePoint(step_folder(tmp_path, 10), 10)
    trainer.resume_mode = "disable"
    assert select(trainer, MODELS) == NOTHING


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("no manifest", "it has no manifest.json: torn, or not written by megatron_rl"),
        ("torn manifest", "manifest.json is not JSON"),
        ("deep manifest", "manifest.json is not JSON"),
        ("missing", f"{FILES[0]} is missing"),
        ("cut", f"{FILES[1]} has 3 bytes, not"),
        ("flipped", f"{FILES[2]} has other content than was written"),
        ("renamed", "its manifest is of step 20"),
    ],
)
def test_damaged_ones_are_skipped_and_named(trainer, tmp_path, how, reason):
    """Auto goes on from the one before, and stops where there is none. Would not catch damage that keeps SHA-256."""
    save(tmp_path, 10)
    save(tmp_path, 20)
    damage(tmp_path, 20, how)
    point = select(trainer, MODELS)
    assert (point.path, point.step) == (step_folder(tmp_path, 10), 10)
    (skipped,) = point.skipped
    assert skipped.startswith(f"{tmp_path}/global_step_") and reason in skipped
    damage(tmp_path, 10, "missing")
    with pytest.raises(ConfigError, match="must resume from a complete checkpoint.*; try: disable; which sets them"):
        select(trainer, MODELS)
    broken = step_folder(tmp_path, 120 if how == "renamed" else 20)
    with pytest.raises(ConfigError, match="cannot be resumed: ") as raised:
        select(at(broken), MODELS)
    assert reason in str(raised.value) and "trainer.resume_mode=auto trainer.resume_from_path=null; " in str(
        raised.value
    )


def test_contents_are_compared_on_demand(trainer, tmp_path):
    """Sizes alone do not see a flipped bit. Would not catch the time that reading everything takes."""
    save(tmp_path, 10)
    damage(tmp_path, 10, "flipped")
    assert select(trainer, MODELS, checksums=False).step == 10


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 48}, "hidden_size of the critic is 48, and configured is 96; head_dim of the critic is 4"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures of the critic is ['LlamaForCausalLM']"),
    ],
)
def test_another_model_is_an_error(trainer, tmp_path, changes, reason):
    """It is not skipped: a fresh start would bury it. Would not catch two models of the same sizes."""
    save(tmp_path, 10)
    path = save_changed(tmp_path, 20, **changes)
    with pytest.raises(ConfigError) as raised:
        select(trainer, MODELS)
    assert reason in str(raised.value) and "try: disable; which sets it aside" in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        select(at(path), MODELS)
    assert reason in str(raised.value) and f"try: {step_folder(tmp_path, 10)}" in str(raised.value)
    with pytest.raises(ConfigError, match="it has no reward"):
        select(at(path), {"reward": MODELS["actor"]})
    # A model folder that cannot be read is reported elsewhere.
    assert select(trainer, {"actor": MODELS["actor"]}).step == 20


def test_another_format_is_an_error(trainer, tmp_path):
    """Of a later version of this program, or of another one. Would not catch a format that was changed in silence."""
    save(tmp_path, 10)
    file = save(tmp_path, 20) / MANIFEST
    text = file.read_text()
    for old, new, reason in (
        (f'"format": {FORMAT}', '"format": 7', f"has format 7; this version reads {FORMAT}"),
        ('"megatron_rl"', '"other"', "is of another project"),
    ):
        file.write_text(text.replace(old, new))
        for config in (trainer, at(file.parent)):
            with pytest.raises(ConfigError, match=reason):
                select(config, MODELS)


def test_a_pickle_that_could_run_code_is_refused(trainer, tmp_path):
    """With all checksums right. Would not catch code in a file that is not loaded as a pickle."""
    save_pickle(tmp_path, 10, pickle.dumps({"a": 1}))
    path = save_pickle(tmp_path, 20, b"cos\nsystem\n(S'true'\ntR.")
    for config in (trainer, at(path)):
        with pytest.raises(
            ConfigError, match=r"loading actor/\.metadata could run any code, because it names os\.system"
        ):
            select(config, MODELS)
    assert select(at(step_folder(tmp_path, 10)), MODELS).step == 10


def test_a_link_to_a_folder_is_refused(trainer, tmp_path):
    """Pickles could hide behind it. Would not catch a link to a file, whose content is checked."""
    folder = save(tmp_path, 10)
    (folder / "actor").rename(tmp_path / "elsewhere")
    (folder / "actor").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="links to folders are not followed: actor"):
        select(trainer, MODELS)


def test_a_path_is_taken_as_it_is(tmp_path):
    """Older ones and such as were set aside, too. Would not catch a path that changes its meaning later."""
    for step in (10, 20):
        save(tmp_path, step)
    assert select(at(step_folder(tmp_path, 10)), MODELS) == ResumePoint(step_folder(tmp_path, 10), 10)
    ((_, aside),) = set_aside(tmp_path, 10)
    assert select(at(aside), MODELS) == ResumePoint(aside, 20)


def test_a_wrong_path_is_an_error_with_the_nearest(tmp_path):
    """No folder, a run's folder, a leftover. Would not catch a folder that exists on this machine only."""
    for step in (10, 20):
        save(tmp_path, step)
    damage(tmp_path, 20, "cut")
    nearest = f"try: {step_folder(tmp_path, 10)}"
    leftover, _ = write_files(tmp_path, 30)
    for path, reason in (
        (step_folder(tmp_path, 11), "must be a checkpoint folder, and it does not exist"),
        (tmp_path, "it is the folder of a run"),
        (step_folder(tmp_path, 20), f"{FILES[1]} has 3 bytes"),
        (leftover, "by its name it is a leftover of a killed run"),
    ):
        with pytest.raises(ConfigError) as raised:
            select(at(path), MODELS)
        message = str(raised.value)
        assert message.startswith(f"trainer.resume_from_path={path}") and reason in message and nearest in message
        (violation,) = raised.value.violations
        assert select(at(Path(violation.nearest["trainer.resume_from_path"])), MODELS).step == 10
    (tmp_path / "other/run").mkdir(parents=True)
    for path, hint in (
        ("other/rum", "did you mean: .*other/run$"),
        ("x/y", "try: trainer.resume_mode=auto trainer"),
    ):
        with pytest.raises(ConfigError, match=hint):
            select(at(tmp_path / path), MODELS)


def listed_anew(folder: Path, models=MODELS, without: str = " ") -> Path:
    """Write a manifest of what is in a complete checkpoint now, but for files whose path starts with `without`."""
    manifest = read_manifest(folder)
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = sorted(path for path in paths if path != MANIFEST and not path.startswith(without))
    write_manifest(folder, Manifest(FORMAT, manifest.step, models, digest_files(folder, names)))
    return folder


@pytest.mark.parametrize(
    ("models", "without", "reason"),
    [
        (MODELS, "", "its manifest does not list run.json; its manifest does not list actor/role.json"),
        (MODELS, "run", "its manifest does not list run.json"),
        (MODELS, "critic/.metadata", "its manifest does not list critic/.metadata"),
        (MODELS, "actor/__1", "its manifest does not list actor/__1_0.distcp"),
        (MODELS, "actor/role", "its manifest does not list actor/role.json"),
        ({}, " ", "its manifest names no role"),
        ({"actor": MODELS["actor"]}, " ", "its manifest names no role critic, and there is such a folder"),
    ],
)
def test_a_manifest_that_leaves_something_out(trainer, tmp_path, models, without, reason):
    """With right hashes, as one made by hand has. Would not catch a file that was deleted and is not listed either."""
    save(tmp_path, 10)
    folder = listed_anew(save(tmp_path, 20), models, without)
    configured = {"actor": MODELS["actor"]} if models else {}
    point = select(trainer, configured)
    assert point.step == 10 and f"{folder}: {reason}" in point.skipped[0]
    for wanted in (lambda: select(at(folder), configured), lambda: usable_checkpoint(folder)):
        with pytest.raises(ConfigError) as raised:
            wanted()
        assert reason in str(raised.value)


def test_folders_that_have_changed_places(trainer, tmp_path):
    """Actor and critic of one step, and actors of two, hashed anew. Would not catch one that is marked anew, too."""
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    for old, new in (("actor", "x"), ("critic", "actor"), ("x", "critic")):
        (folder / old).rename(folder / new)
    with pytest.raises(ConfigError, match="actor was saved as {'role': 'critic', 'step': 20}, not as"):
        select(at(listed_anew(folder)), MODELS)
    assert select(trainer, MODELS).step == 10
    other = save(tmp_path, 20)
    shutil.rmtree(other / "critic")
    shutil.copytree(step_folder(tmp_path, 10) / "critic", other / "critic")
    with pytest.raises(ConfigError, match="critic was saved as {'role': 'critic', 'step': 10}, not as"):
        usable_checkpoint(listed_anew(other))


def test_a_role_file_that_is_no_json(trainer, tmp_path):
    """Hashed anew. Would not catch one with further keys, which is another owner's."""
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    (folder / "actor/role.json").write_text("[" * 100_000)
    listed_anew(folder)
    point = select(trainer, MODELS)
    assert point.step == 10 and "actor/role.json is not JSON" in point.skipped[0]


def test_what_others_leave_in_a_folder_does_no_harm(trainer, tmp_path):
    """Files of systems, notes, exported models, links, and a pickle that nobody loads. Would not catch a hidden file
    that a loader reads."""
    folder = save(tmp_path, 10)
    for name in (".nfs0001", "actor/.DS_Store", "notes.txt", "actor/notes.txt", "hf/config.json", "actor/mean/a.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "hf/training_args.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (folder / "mean").symlink_to(tmp_path)
    os.mkfifo(folder / "actor/a_pipe")
    assert select(trainer, MODELS).step == 10 and usable_checkpoint(folder) == folder


@pytest.mark.parametrize(
    "name", ["actor/common.pt", "actor/__7_0.distcp", "actor/metadata.json", "actor/huggingface/a"]
)
def test_what_a_loader_would_read_must_be_listed(trainer, tmp_path, name):
    """A file, a folder and a pipe of such a name. Would not catch names that another megatron-core reads."""
    save(tmp_path, 10)
    file = save(tmp_path, 20) / name
    file.parent.mkdir(exist_ok=True)
    for make in (file.touch, lambda: os.mkfifo(file), file.mkdir):
        if make == file.mkdir and file.suffix == "":
            continue  # a folder of the model's: its files are compared
        make()
        point = select(trainer, MODELS)
        assert point.step == 10 and f"its manifest does not list {name}" in point.skipped[0]
        file.rmdir() if file.is_dir() else file.unlink()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [MANIFEST, "actor/__0_0.distcp", "actor/role.json", "run.json"])
def test_a_pipe_is_not_waited_for(trainer, tmp_path, name):
    """In the place of a file, even of an empty one. Would not catch a disk that hangs."""
    save(tmp_path, 10)
    folder, manifest = write_files(tmp_path, 20)
    (folder / "actor/__0_0.distcp").write_bytes(b"")
    empty = digest_files(folder, ["actor/__0_0.distcp"])
    folder = commit(folder, Manifest(manifest.format, 20, MODELS, manifest.files | empty))
    assert select(trainer, MODELS).step == 20
    (folder / name).unlink()
    os.mkfifo(folder / name)
    point = select(trainer, MODELS)
    assert point.step == 10 and f"{name} must be a file, and it is a pipe" in point.skipped[0]


@pytest.mark.parametrize("asked", ["", "global_step_10"])
def test_a_run_without_checkpoints_names_its_model(tmp_path, asked):
    """Where the run is named, or a checkpoint that it did not write; and eval takes the model. A folder that is not
    there, or is neither a run's nor a checkpoint, is said to be that. Would not catch a model that is torn.
    """
    with pytest.raises(ConfigError, match="there is no folder .*_10$" if asked else "is neither a checkpoint"):
        usable_checkpoint(tmp_path / asked)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"has no checkpoints, because its run has saved none \(trainer.save_freq\)$"):
        usable_checkpoint(tmp_path / asked)
    (tmp_path / "hf_model").mkdir()
    (tmp_path / "hf_model/config.json").touch()
    with pytest.raises(ConfigError, match=f"; its trained model is {tmp_path}/hf_model, a Hugging Face folder$"):
        usable_checkpoint(tmp_path / asked)
    with pytest.raises(ConfigError, match="hf_model is a Hugging Face folder, and no checkpoint"):
        usable_checkpoint(tmp_path / "hf_model")
    assert model_folder(tmp_path, tmp_path / "out", pytest.fail) == tmp_path / "hf_model"
    saved = save(tmp_path, 20)
    assert usable_checkpoint(tmp_path) == saved
    with pytest.raises(ConfigError, match="there is no folder .*/global_step_3; try: .*/global_step_20$"):
        usable_checkpoint(tmp_path / "global_step_3")


def test_what_cannot_be_read_is_told(trainer, tmp_path):
    """A folder whose name is too long, a file that is a folder. Would not catch a disk that hangs."""
    too_long = tmp_path / ("x" * 300)
    for config in (TrainerConfig(default_local_dir=str(too_long)), at(too_long)):
        with pytest.raises(ConfigError, match="must be a folder that can be read: File name too long"):
            select(config, MODELS)
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        usable_checkpoint(too_long)
    save(tmp_path, 10)
    (save(tmp_path, 20) / "actor/common.pt").mkdir()
    point = select(trainer, MODELS)
    assert point.step == 10 and "its manifest does not list actor/common.pt" in point.skipped[0]


def test_listed_files_are_compared_where_both_sides_list_them():
    """A folder that got its list later goes on; another file does not. Would not catch a list that was removed."""
    (actor, saved, listed, other) = (
        "actor",
        {"weights": "a"},
        {"weight files": {"m": "1"}},
        {"weight files": {"m": "2"}},
    )
    manifests = [Manifest(4, 1, {actor: saved | files}, {}) for files in ({}, listed)]
    assert _differences(manifests[0], {actor: saved | listed}) == []
    assert _differences(manifests[1], {actor: saved | listed}) == _differences(manifests[1], {actor: saved}) == []
    assert _differences(manifests[1], {actor: saved | other}) == [
        "weight files of the actor is {'m': '1'}, and configured is {'m': '2'}"
    ]


def test_another_checkpoint_under_the_same_path_is_another_export(tmp_path: Path) -> None:
    """One of the same step, and a copy elsewhere. Would not catch a file that was damaged after it was written."""
    first, copied = save(tmp_path / "run", 3), save(tmp_path / "copy", 3)
    name = export_name(first)
    assert name == export_name(copied) and name.startswith("global_step_3_")
    shutil.rmtree(first)
    assert export_name(save(tmp_path / "run", 3, "trained anew")) != name
