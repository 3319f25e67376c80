"""How a run takes its folder: what another one has just saved there counts, and no name in it is read as markup."""

from __future__ import annotations

import dataclasses
import io
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.checkpoint.contents import RUN_FILE, write_role_file
from megatron_rl.checkpoint.folders import commit, unfinished_folder
from megatron_rl.checkpoint.manifest import FORMAT, Manifest, digest_files
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.cluster.signals import LastResort, StopRequest
from megatron_rl.config.load import load_config
from megatron_rl.config.task_config import for_task
from megatron_rl.controller.lifecycle import Lifecycle, StopPolicy
from megatron_rl.controller.repairs import Repairs
from megatron_rl.controller.report import kept_summary
from megatron_rl.controller.run_folder import RunFolder
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.controller.run_setup import nothing_to_train, write_plan
from megatron_rl.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


def new_run(folder: Path, monkeypatch, *overrides: str) -> tuple[RunFolder, RunLogger]:
    monkeypatch.chdir(REPOSITORY)
    settings = (f"trainer.default_local_dir={folder}", "trainer.save_freq=1", "trainer.logger=[jsonl]", *overrides)
    config = load_config("configs/demo_cpu.yaml", settings)
    run_folder = RunFolder(config)
    return run_folder, RunLogger(config, run_folder, ModelFolder(config.actor_rollout_ref.model.path).tokenizer, {})


def save(folder: RunFolder, logger: RunLogger, step: int) -> None:
    """What a run of this configuration keeps of itself after `step`, without weights."""
    unfinished = unfinished_folder(folder.path, step)
    names = [RUN_FILE]
    for role in ("actor", "critic"):
        (unfinished / role).mkdir(parents=True)
        write_role_file(unfinished, role, step)
        (unfinished / role / ".metadata").write_bytes(b"\x80\x02N.")
        names += [f"{role}/role.json", f"{role}/.metadata"]
    state = {"step": step} | logger.state_dict()
    content = {"run": state, "config": dataclasses.asdict(logger.config), "roles": {}}
    (unfinished / RUN_FILE).write_text(json.dumps(content))
    commit(unfinished, Manifest(FORMAT, step, folder.models, digest_files(unfinished, names)))


@pytest.mark.parametrize(
    ("error", "was_there", "line", "stays"),
    [
        (ConfigError, False, "", False),
        (ConfigError, False, "{}", True),
        (ConfigError, True, "", True),
        (RuntimeError, False, "", True),
    ],
)
def test_a_refused_run_leaves_no_folder(tmp_path, monkeypatch, error, was_there, line, stays):
    """Its own folder, while nothing is in a file of it. Would not catch what Ray writes elsewhere."""
    folder = tmp_path / "run"
    if was_there:
        folder.mkdir()
    run_folder, _ = new_run(folder, monkeypatch)
    with pytest.raises(error), run_folder:
        (folder / "tensorboard").mkdir()
        (folder / "metrics.jsonl").write_text(line)
        raise error("the model cannot be used")
    assert folder.exists() == stays


def test_a_checkpoint_of_another_stage_is_refused(tmp_path, monkeypatch):
    """Of PPO by sft, which trains the same actor. Would not catch two runs of one stage with other losses."""
    run_folder, logger = new_run(tmp_path, monkeypatch)
    with run_folder:
        save(run_folder, logger, 1)
    with pytest.raises(ConfigError, match="global_step_1 was saved by ppo, and this is sft; try: another trainer"):
        RunFolder(for_task(logger.config, "sft"))


def test_files_of_an_earlier_run_are_set_aside(tmp_path, monkeypatch):
    """Twice, with events and tables; a user's file stays, and so does what a resumed run, a repair or an evaluation
    finds. Would not catch a file under a name that no run had so far.
    """

    def ends(first: str) -> None:
        (tmp_path / "metrics.jsonl").write_text(first)
        for file in ("tensorboard/events.1", "hf_model/config.json", "tables/1.jsonl", "notes.txt"):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(first)

    table = f"trainer.rollout_data_dir={tmp_path / 'tables'}"
    for number, name in enumerate((None, "run.set_aside", "run.set_aside.2")):
        run_folder, _ = new_run(tmp_path, monkeypatch, table)
        with run_folder:
            assert run_folder.set_aside == (None if name is None else tmp_path / name)
            ends(f"{number}")
        if name is not None:
            moved = {file.relative_to(tmp_path / name).as_posix() for file in (tmp_path / name).rglob("*.*")}
            assert moved == {"metrics.jsonl", "tensorboard/events.1", "hf_model/config.json", "tables/1.jsonl"}
            assert (tmp_path / name / "metrics.jsonl").read_text() == f"{number - 1}"

    reader, _ = new_run(tmp_path, monkeypatch, f"data.val_files=[x,{tmp_path / 'hf_model/rows.parquet'}]")
    with pytest.raises(ConfigError, match=f"rows.parquet is a file of the run .*; try: .*={tmp_path}-2"), reader:
        pass
    evaluation, _ = new_run(tmp_path, monkeypatch, "trainer.val_only=true")
    with evaluation:
        assert evaluation.set_aside is None
    config = load_config("configs/demo_cpu.yaml", [f"trainer.default_local_dir={tmp_path}"])
    repairs = Repairs(config, StopRequest(LastResort()), local=False)
    repairs.attempt = 1
    with RunFolder(config, repairs) as repaired:
        assert repaired.set_aside is None
    resumed, logger = new_run(tmp_path, monkeypatch)
    save(resumed, logger, 2)
    resumed, _ = new_run(tmp_path, monkeypatch)
    with resumed:
        assert resumed.set_aside is None and (tmp_path / "metrics.jsonl").read_text() == "2"


class NothingDrawn:
    """Of a run without steps."""

    def saving(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def write(self, folder: Path, step: int) -> list[str]:
        return []


def test_what_is_saved_while_a_run_starts_is_gone_on_from(tmp_path, monkeypatch):
    """An older run ends between the choice of the checkpoint and the lock; a third run is refused. No processes.

    Would not catch a run on another machine whose files come late.
    """
    path = tmp_path / "run [/x] [bold]"
    first, first_logger = new_run(path, monkeypatch)
    with first:
        third, _ = new_run(path, monkeypatch)
        with pytest.raises(ConfigError, match="another run is writing"), third:
            pass
        second, logger = new_run(path, monkeypatch)
        assert second.start.step == 0 and second.resumed_step is None
        first_logger.val_rewards = [0.25]
        save(first, first_logger, 3)
    logger.console = Console(file=io.StringIO(), width=40)
    with second, logger:
        second.give_back(logger.load_state_dict)
        assert (second.start.step, logger.val_rewards) == (3, [0.25])
        second.saved["config"]["trainer"]["project_name"] = "[/y]"
        last_resort = LastResort()
        last_resort.stand_down()
        stop = StopRequest(last_resort)
        life = Lifecycle(
            logger, {}, (logger,), StopPolicy(stop), NothingDrawn(), Repairs(logger.config, stop, local=True)
        )
        assert life.is_resumed
        life.restore()
        assert next(life.steps()) == 4
    said = logger.console.file.getvalue()
    assert f"resuming after step 3, from {path}/global_step_3" in said and "project_name was [/y], is " in said


@pytest.mark.parametrize(
    ("steps", "written", "has_plan", "is_kept"),
    [(2, 2, True, True), (2, 1, True, False), (1, 2, True, True), (3, 2, True, False), (2, 2, False, False)],
)
def test_a_start_that_trains_nothing_keeps_the_records(tmp_path, monkeypatch, steps, written, has_plan, is_kept):
    """By hand: after step 2, of a summary of `written` steps. A plan that is missing, and a summary of fewer steps, are
    written. Would not catch a record that another function writes: tests/e2e/test_resumed_runs.py.
    """
    keys = (f"trainer.total_training_steps={steps}", "actor_rollout_ref.actor.optim.lr=1e-9")
    before, logger = new_run(tmp_path, monkeypatch)
    with before:
        save(before, logger, 2)
    (tmp_path / "summary.json").write_text(json.dumps({"steps": written}))
    for name in ("timeline.json", *(["plan.json"] if has_plan else [])):
        (tmp_path / name).write_text("[]\n")
    run_folder, logger = new_run(tmp_path, monkeypatch, *keys)
    with run_folder:
        write_plan(logger)
    is_finished = steps <= 2
    assert run_folder.is_finished == is_finished and run_folder.keeps("timeline.json") == is_finished
    assert (kept_summary(run_folder) is not None and has_plan) == is_kept
    assert ((tmp_path / "plan.json").read_text() == "[]\n") == (is_finished and has_plan)


def test_a_finished_run_says_what_goes_further():
    """By hand. Would not catch a limit of the data."""
    trainer = load_config(REPOSITORY / "configs/demo_cpu.yaml", ["trainer.total_training_steps=20"]).trainer
    further = "trainer.total_training_steps=40, or another trainer.default_local_dir"
    assert nothing_to_train(trainer, 20).startswith("20 of 20 steps were done before: nothing is trained, and ")
    assert nothing_to_train(trainer, 20).endswith(f"; to go further: {further}")
    trainer.total_epochs = 3
    assert nothing_to_train(trainer, 20).endswith(f"; to go further: trainer.total_epochs=6 {further}")
