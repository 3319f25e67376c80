"""When a run saves, what it goes on from, and how a signal ends it: the controller's side of checkpoints.

global_step_N/  manifest.json          every file's size and checksum; written last
                run.json               step, prompt cursor, KL controller, books, configuration
                actor/ critic/         megatron-core's sharded files, role.json, `huggingface/` with config and
                                       tokenizer; no critic/ where none is trained
                rng_R.json             random states of rank R
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.contents import ROLE_FILE, RUN_FILE, write_role_file
from megatron_rl.checkpoint.folders import (
    HF_FOLDER,
    commit,
    remove_old,
    set_aside,
    step_folder,
    sweep,
    unfinished_folder,
)
from megatron_rl.checkpoint.manifest import FORMAT, FileRecord, Manifest, digest_files
from megatron_rl.checkpoint.storage import storing
from megatron_rl.cluster.worker_group import WorkerGroup
from megatron_rl.config.algorithms import trained_roles
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import StoppedAfterStep, StoppedBeforeStep, StorageError
from megatron_rl.records import RoleState
from megatron_rl.run import Run, StepAbandoned

MODEL_FILES = (".json", ".jinja", ".model", ".txt")
"""Kinds of files, beside weights, of which a Hugging Face folder consists."""


class Checkpoints:
    """The checkpoints of one run. `restore` comes first, after the roles were built; `settle` last.

    All methods raise StorageError where files cannot be written.
    """

    def __init__(self, run: Run, workers: WorkerGroup) -> None:
        trainer = run.config.trainer
        self.run, self.workers = run, workers
        self.root = run.directory.resolve()
        self.every, self.keep = trainer.save_freq, trainer.max_ckpt_to_keep
        self._under_way: Manifest | None = None

    def restore(self) -> None:
        """Bring the workers to where the run goes on; checkpoints of a past that this leaves are set aside."""
        start = self.run.start
        with storing("the checkpoints", self.root):
            sweep(self.root)
        if start.path is not None:
            saved = self.run.saved
            states = {role: RoleState(**state) for role, state in saved["roles"].items()}
            same_layout = all(self.workers.load_checkpoint(start.path.resolve(), states).get())
            self.run.say_resumed(saved["config"], same_layout)
        # From the beginning, or from another run's folder: then nothing that is here belongs to this past.
        goes_on = start.path is not None and start.path.resolve().parent == self.root
        with storing("the checkpoints", self.root):
            renamed = set_aside(self.root, after_step=start.step if goes_on else -1)
        for old, new in renamed:
            self.run.say(f"{old.name} is of a past that this run has left; it is now {new.name}")

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Round one step: saves after it where one is due, or what was before it when it is abandoned.

        Raises StoppedAfterStep or StoppedBeforeStep when a signal asked the run to stop.
        """
        before = self.run.state_dict(step - 1)
        if self._under_way is not None:
            self._try_to_finish(wait=False)
        try:
            yield
        except StepAbandoned:
            self._save_now(before)
            self.run.stop.fulfil(StoppedBeforeStep.exit_code)
            raise StoppedBeforeStep(f"stopped in step {step}, which was given up; step {step - 1} is saved") from None
        stopping = self.run.stop.is_set
        last = self.run.config.trainer.total_training_steps
        if self.every > 0 and (stopping or step % self.every == 0 or step == last):
            self._begin(self.run.state_dict(step))
        if stopping:
            self.settle()
            self.run.stop.fulfil(StoppedAfterStep.exit_code)
            raise StoppedAfterStep(f"stopped after step {step}, which is saved")

    def settle(self) -> None:
        """Wait until the save that is under way is complete."""
        if self._under_way is not None:
            self._try_to_finish(wait=True)

    def _save_now(self, state: dict[str, Any]) -> None:
        self.settle()
        if not step_folder(self.root, state["step"]).exists():
            self._begin(state)
            self.settle()

    def _begin(self, state: dict[str, Any]) -> None:
        """Start to save; where no role saves beside training this is all but the last moment of it."""
        self.settle()
        self.run.keep_folder()
        started = time.monotonic()
        with self.run.phase("save_checkpoint"), self._storing(state["step"]):
            folder = unfinished_folder(self.root, state["step"])
            shutil.rmtree(folder, ignore_errors=True)
            for role in trained_roles(self.run.config):
                (folder / role).mkdir(parents=True)
            roles = self.workers.begin_save(folder).get()[0]
            content = {
                "run": state,
                "roles": {role: dataclasses.asdict(numbers) for role, numbers in roles.items()},
                "config": dataclasses.asdict(self.run.config),
            }
            (folder / RUN_FILE).write_text(json.dumps(content, indent=1))
            for role in roles:
                write_role_file(folder, role, state["step"])
            self._under_way = Manifest(FORMAT, state["step"], self.run.models, files={})
        if not self.run.saves_beside_training:
            self.settle()
        self.run.save_seconds = time.monotonic() - started

    def _try_to_finish(self, wait: bool) -> None:
        with self.run.phase("save_checkpoint"), self._storing(self._under_way.step):
            reports = self.workers.finish_save(wait).get()
            if None in reports:
                return
            manifest, self._under_way = self._under_way, None
            folder = unfinished_folder(self.root, manifest.step)
            files: dict[str, FileRecord] = {name: record for report in reports for name, record in report.items()}
            owners = [f"{role}/{ROLE_FILE}" for role in trained_roles(self.run.config)]
            names = [RUN_FILE, *owners, *copy_model_files(self.run.config, folder)]
            commit(folder, dataclasses.replace(manifest, files=files | digest_files(folder, names)))
            remove_old(self.root, self.keep)

    @contextmanager
    def _storing(self, step: int) -> Iterator[None]:
        """Round what writes the checkpoint of `step`: StorageError where that fails, and no unfinished folder."""
        try:
            with storing(step_folder(self.root, step).name, self.root):
                yield
        except StorageError:
            shutil.rmtree(unfinished_folder(self.root, step), ignore_errors=True)
            raise


def copy_model_files(config: RunConfig, folder: Path) -> list[str]:
    """Put configuration and tokenizer of each role beside its weights; returns the files' paths in `folder`."""
    names = []
    for role, path in trained_roles(config).items():
        target = folder / role / HF_FOLDER
        target.mkdir(exist_ok=True)
        for file in sorted(Path(path).iterdir()):
            if file.suffix in MODEL_FILES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)
                names.append(f"{role}/{HF_FOLDER}/{file.name}")
    return names
