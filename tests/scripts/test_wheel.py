"""The wheel: built, unpacked elsewhere, and used from another folder, without the sources beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def typed(*arguments: str, folder: Path, **variables: str) -> str:
    """What a command prints; AssertionError where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_the_wheel_has_all_that_commands_read(tmp_path: Path) -> None:
    """Planned, rehearsed data, a page and a project from the unpacked wheel: its templates, tables and scripts are in
    it, and nothing is read from the repository, which is not on any path. Libraries are those that are installed. Would
    not catch a requirement that the wheel does not state: `doctor` asks for those.
    """
    source, site, here = tmp_path / "source", tmp_path / "site", tmp_path / "here"
    here.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("megatron_rl", "third_party_patches"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    typed(*pip, str(tmp_path), str(source), folder=tmp_path)
    (wheel,) = tmp_path.glob("megatron_rl-*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    shutil.rmtree(source)
    files = {
        str(file.relative_to(REPOSITORY))
        for name in ("megatron_rl", "third_party_patches")
        for file in (REPOSITORY / name).rglob("*")
    }
    kept = {name for name in files if not name.endswith((".pyc", "__pycache__")) and (REPOSITORY / name).is_file()}
    assert {name for name in kept if not (site / name).exists()} == set()
    where = typed(
        sys.executable, "-c", "import megatron_rl; print(megatron_rl.__file__)", folder=here, PYTHONPATH=str(site)
    )
    assert Path(where.strip()).is_relative_to(site)
    command = (sys.executable, "-m", "megatron_rl")

    def megatron_rl(*arguments: str) -> str:
        return typed(*command, *arguments, folder=here, PYTHONPATH=str(site))

    megatron_rl("init", "mine", "--model", "tiny", "--kind", "exact", "--gpus", "0")
    assert "Plan of mine/run.yaml" in megatron_rl("plan", "--config", "mine/run.yaml")
    assert "Qwen3_5" in megatron_rl("families")
    short = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "--local")
    assert "hf_model" in megatron_rl("train", "--config", "mine/run.yaml", *short)
    assert "view.html" in megatron_rl("view", "mine/output")
