"""Where commands may write: beside a checkpoint, never into one, and under names that the file system takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from saved import save
from typer.testing import CliRunner

from megatron_rl.checkpoint.output_paths import checkpoint_round, path_outside, refuse_target
from megatron_rl.checkpoint.resume import usable_checkpoint
from megatron_rl.cli import app
from megatron_rl.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
CONFIG = ("--config", str(REPOSITORY / "configs/demo_cpu.yaml"))


def test_what_is_within_a_checkpoint(tmp_path, monkeypatch):
    """Itself, what is below it, through links and back again; not its neighbours, nor a folder of its name without a
    manifest. Would not catch a second name of the same disk."""
    folder = save(tmp_path / "run", 4)
    (tmp_path / "link").symlink_to(folder / "actor")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty/global_step_4").mkdir(parents=True)
    monkeypatch.chdir(folder)
    inside = (folder, folder / "hf", folder / "actor/a/b", tmp_path / "link/mean", Path("x"), tmp_path / "x/../link")
    assert [checkpoint_round(path) for path in inside] == [folder] * len(inside)
    outside = (
        "run",
        "run/hf",
        "run/global_step_4/..",
        "run/global_step_4.x",
        "loop/a",
        "empty/global_step_4",
        "a" * 300,
    )
    assert [checkpoint_round(tmp_path / path) for path in outside] == [None] * len(outside)
    assert path_outside(folder, folder / "actor/hf") == tmp_path / "run/global_step_4-hf"


@pytest.mark.parametrize(
    "command",
    [
        ("export", "--checkpoint", "run", "--target"),
        ("average", "--checkpoints", "run", "run", "--target"),
        ("port", "algorithm.gamma=1.0", "--out"),
        ("map", *CONFIG, "--gpus", "4", "--out"),
        ("map", *CONFIG, "--gpus", "4", "--picture"),
        ("map", *CONFIG, "--gpus", "4", "--points"),
        ("profile", "--hardware-file"),
        ("nightly", *CONFIG, "--folder"),
        ("nightly", *CONFIG, "--renew", "--golden"),
        ("ablate", "--config", str(REPOSITORY / "configs/ablation.yaml"), "--folder"),
    ],
)
def test_no_command_writes_into_a_checkpoint(tmp_path, monkeypatch, command):
    """Before anything is read or measured; the checkpoint stays as it is. Would not catch a new command."""
    folder = save(tmp_path / "run", 4)
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(REPOSITORY if command[0] == "ablate" else tmp_path)
    result = CliRunner().invoke(app, [*command, f"{folder}/new.yaml"])
    assert isinstance(result.exception, ConfigError), result.output
    assert str(result.exception) == (
        f"{command[-1]} {folder}/new.yaml must not be inside of a checkpoint, {folder}; "
        f"try: {command[-1]} {tmp_path}/run/global_step_4-new.yaml"
    )
    assert sorted(folder.rglob("*")) == before and usable_checkpoint(folder) == folder


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("a" * 245, "must have a name of at most 244 bytes, and it has 245"),
        ("é" * 123, "must have a name of at most 244 bytes, and it has 246"),
        ("a" * 300 + "/b", "must have a name of at most 244 bytes, and it has 300"),
        ("/".join(["abcdefg"] * 600), "must have a path of at most 4051 bytes"),
        ("there", "must not exist, and it is a folder; try: --target other"),
        ("file", "must not exist, and it is a file"),
        ("nowhere", "must not exist, and it is a link to nothing"),
        ("file/x", "must be a folder that can be made, and .*file is no folder"),
    ],
)
def test_a_target_is_refused_before_the_work(tmp_path, target, said):
    """With the limit. Would not catch a file system with shorter names below a folder."""
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("gone")
    with pytest.raises(ConfigError, match=said):
        refuse_target(tmp_path / target, nearest=Path("other"))
    for name in ("a" * 244, "new/below/it"):
        refuse_target(tmp_path / name, nearest=Path("other"))
    (tmp_path / ("a" * 244 + ".unfinished")).mkdir()
    assert os.pathconf(tmp_path, "PC_NAME_MAX") == 255
