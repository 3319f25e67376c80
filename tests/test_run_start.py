"""How a run takes its folder: what another one has just saved there counts, and no name in it is read as markup."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.checkpoint.contents import RUN_FILE, write_role_file
from megatron_rl.checkpoint.folders import commit, unfinished_folder
from megatron_rl.checkpoint.manifest import FORMAT, Manifest, digest_files
from megatron_rl.cluster.last_resort import LastResort
from megatron_rl.cluster.signals import StopRequest
from megatron_rl.config.load import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.planner.resume_rules import configured_models
from megatron_rl.run import Run

REPOSITORY = Path(__file__).parents[1]


def new_run(folder: Path, monkeypatch) -> Run:
    monkeypatch.chdir(REPOSITORY)
    settings = (f"trainer.default_local_dir={folder}", "trainer.save_freq=1", "trainer.logger=[jsonl]")
    last_resort = LastResort()
    last_resort.stand_down()
    return Run(load_config("configs/demo_cpu.yaml", settings), StopRequest(last_resort))


def save(run: Run, step: int) -> None:
    """What a run of this configuration keeps of itself after `step`, without weights."""
    folder = unfinished_folder(run.directory, step)
    names = [RUN_FILE]
    for role in ("actor", "critic"):
        (folder / role).mkdir(parents=True)
        write_role_file(folder, role, step)
        (folder / role / ".metadata").write_bytes(b"\x80\x02N.")
        names += [f"{role}/role.json", f"{role}/.metadata"]
    content = {"run": run.state_dict(step), "config": dataclasses.asdict(run.config), "roles": {}}
    (folder / RUN_FILE).write_text(json.dumps(content))
    commit(folder, Manifest(FORMAT, step, configured_models(run.config), digest_files(folder, names)))


def test_what_is_saved_while_a_run_starts_is_gone_on_from(tmp_path, monkeypatch):
    """An older run ends between the choice of the checkpoint and the lock; a third run is refused. No processes but the
    reward's.

    Would not catch a run on another machine whose files come late.
    """
    folder = tmp_path / "run [/x] [bold]"
    with new_run(folder, monkeypatch) as first:
        with pytest.raises(ConfigError, match="another run is writing"), new_run(folder, monkeypatch):
            pass
        second = new_run(folder, monkeypatch)
        assert second.start.step == 0
        first.val_rewards = [0.25]
        save(first, 3)
    second.console = Console(file=io.StringIO(), width=40)
    with second:
        assert (second.start.step, second.val_rewards) == (3, [0.25])
        assert second.cursor.state_dict() == first.cursor.state_dict()
        assert list(second.steps())[0] == 4
        second.say_resumed(second.saved["config"] | {"trainer": {"project_name": "[/y]"}}, same_layout=True)
    said = second.console.file.getvalue()
    assert f"going on after step 3, from {folder}/global_step_3" in said and "project_name was [/y], is " in said
