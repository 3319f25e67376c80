"""The lifecycle of a run: which steps it takes, where it resumes, when it saves, and how a signal ends it.

global_step_N/  manifest.json          every file's size and checksum; written last
                rollouts.safetensors   responses generated for later steps, if they outlive a step
                earlier_answers.safetensors   the last responses to each prompt, if rollouts draft from them
                run.json               step, prompt cursor, KL controller, logger, configuration
                actor/ critic/         megatron-core's sharded files, role.json, `huggingface/` with config and
                                       tokenizer; one folder for each trained role
                actor_reference/       a reference in another pool that has moved
                rng_POOL_R.json        random states of rank R of a pool
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

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
from megatron_rl.checkpoint.weight_files import MODEL_FILES
from megatron_rl.cluster.signals import StopRequest
from megatron_rl.config.load import flat_settings
from megatron_rl.config.roles import Placement, trained_roles
from megatron_rl.config.steps import is_save_step
from megatron_rl.config.urls import without_secrets
from megatron_rl.controller.repairs import Repairs
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.dispatch import RemoteMethod, Stop
from megatron_rl.errors import StoppedAfterStep, StoppedBeforeStep, StorageError
from megatron_rl.records import RoleState
from megatron_rl.roles.host import RankHost

MAY_CHANGE = ("trainer.resume_mode", "trainer.resume_from_path")
"""Keys whose changes are not reported when a run resumes."""


class StepAbandoned(Exception):
    """A step is abandoned before it changed anything, because a signal asked the run to stop and time is short."""


class DrawnAhead(Protocol):
    """Data made in advance for the steps after a checkpoint, such as responses."""

    def saving(self, step: int) -> AbstractContextManager[None]:
        """Hold the data still while a checkpoint after `step` is written."""

    def write(self, folder: Path, step: int) -> list[str]:
        """Write the data to the checkpoint's folder; returns names of the files. Raises OSError."""


class Stateful(Protocol):
    """A part of the run that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""


class StopPolicy:
    """Decides whether a step that a signal interrupts may still end in time, judging by the last step."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop
        self.save_seconds = 0.0
        self._started, self._last_step_s = 0.0, math.inf
        self._must_finish = True

    def begin_step(self) -> None:
        """Allow abandoning the step, until a remote method changes weights."""
        self._started, self._must_finish = time.monotonic(), False

    def end_step(self) -> None:
        """The step is over."""
        self._last_step_s, self._must_finish = time.monotonic() - self._started, True

    def before(self, method: RemoteMethod) -> None:
        """Called before a remote method. Raises StepAbandoned if the run is to stop and the step would end too late."""
        if self._must_finish or method.stop is Stop.UNRELATED:
            return
        left = self._last_step_s + self.save_seconds - (time.monotonic() - self._started)
        if self.stop.is_set and left > self.stop.remaining_s():
            raise StepAbandoned
        self._must_finish = method.stop is Stop.NEVER_AFTER


class Lifecycle:
    """Steps and checkpoints of one run; a context manager around its steps.

    hosts: pool -> handle of its hosts. parts: the controller's state in a checkpoint. drawn: data made in advance for
    later steps. repairs: take copies of the state. best: returns the step whose checkpoint is written and kept
    whatever the other keys say, or None.
    All methods raise StorageError if files cannot be written.
    """

    def __init__(
        self,
        logger: RunLogger,
        hosts: Mapping[str, RankHost],
        parts: tuple[Stateful, ...],
        stop_policy: StopPolicy,
        drawn: DrawnAhead,
        repairs: Repairs,
        best: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.logger, self.config, self.folder = logger, logger.config, logger.folder
        self.hosts, self.parts = hosts, parts
        self.stop_policy, self.drawn, self.best, self.repairs = stop_policy, drawn, best, repairs
        self.root = self.folder.path.resolve()
        self._trained = trained_roles(self.config)
        trained = Placement.of(self.config).trained
        self._saves_beside_training = any(role.settings.checkpoint.async_save for role in trained)
        self._before_step: dict[str, Any] = {}
        self._under_way: Manifest | None = None
        self._drawn_files: list[str] = []

    @property
    def is_resumed(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return self.folder.start.path is not None

    def restore(self) -> None:
        """Load the checkpoint to resume. Call it first, once all roles are built.

        Checkpoints newer than the resume step are renamed; they belong to an abandoned run.
        """
        start = self.folder.start
        with storing("the checkpoints", self.root):
            sweep(self.root)
        if start.path is not None:
            states = {role: RoleState(**state) for role, state in self.folder.saved["roles"].items()}
            if (copy := self.folder.copy) is not None:
                place = self.repairs.place(copy.attempt)
                loading = [host.load_copy(place, copy.step, states) for host in self.hosts.values()]
            else:
                loading = [host.load_checkpoint(start.path.resolve(), states) for host in self.hosts.values()]
            same_layout = all(all(future.get()) for future in loading)
            self._say_resumed(same_layout)
        # From the beginning, or from another run's folder: existing checkpoints are stale.
        is_own = start.path is not None and start.path.resolve().parent == self.root
        goes_on = is_own or self.folder.copy is not None
        with storing("the checkpoints", self.root):
            renamed = set_aside(self.root, after_step=start.step if goes_on else -1)
        for old, new in renamed:
            self.logger.say(f"{old.name} is of a past that this run has left; it is now {new.name}")

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps to take, from 1 or from the step after the checkpoint.

        Saves after a step if due. Raises StoppedAfterStep if a signal asked the run to stop.
        """
        first = self.folder.start.step
        self.logger.next_metrics |= self.repairs.begun(first, self.folder.source, self.folder.path)
        num_steps = self.config.trainer.num_steps
        if first < num_steps:
            self.logger.title(f"Training, steps {first + 1} to {num_steps}")
        for step in range(first + 1, num_steps + 1):
            self._before_step = self._state(step - 1)
            if self._under_way is not None:
                self._try_to_finish(wait=False)
            self.stop_policy.begin_step()
            self.logger.begin_step(step)
            yield step
            self.stop_policy.end_step()
            self._after(step)
        self.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an abandoned step, save the state before it and raise StoppedBeforeStep instead."""
        if isinstance(error, StepAbandoned):
            before = self._before_step
            self._save_now(before)
            self.stop_policy.stop.fulfil(StoppedBeforeStep.exit_code)
            step = before["step"]
            message = f"stopped in step {step + 1}, which was given up; step {step} is saved"
            raise StoppedBeforeStep(message + self._continuation(step)) from None

    def check_stop(self) -> None:
        """Raise StoppedBeforeStep if a signal asked to stop before the first step, when there is nothing to save."""
        if self.stop_policy.stop.is_set:
            self.stop_policy.stop.fulfil(StoppedBeforeStep.exit_code)
            raise StoppedBeforeStep("stopped before the first step; there was nothing to save")

    def settle(self) -> None:
        """Wait until a save in progress is complete."""
        if self._under_way is not None:
            self._try_to_finish(wait=True)

    def _after(self, step: int) -> None:
        trainer, stopping = self.config.trainer, self.stop_policy.stop.is_set
        is_saved = is_save_step(trainer, step) or ((stopping or step == self.best()) and trainer.save_freq > 0)
        if is_saved:
            self._begin(self._state(step))
        self._keep_for_repairs(step, is_saved=is_saved and self._under_way is None)
        if stopping:
            self.settle()
            self.stop_policy.stop.fulfil(StoppedAfterStep.exit_code)
            raise StoppedAfterStep(f"stopped after step {step}, which is saved{self._continuation(step)}")

    def _continuation(self, step: int) -> str:
        """What the same command does when `step` is saved, for the end of a sentence."""
        trainer = self.config.trainer
        if trainer.resume_mode != "auto":
            return ""
        what = f"continues from step {step + 1}" if step < trainer.num_steps else "finishes the run"
        return f"; the same command {what}"

    def _state(self, step: int) -> dict[str, Any]:
        """State of the controller that the steps after `step` depend on or add to; JSON-ready."""
        state: dict[str, Any] = {"step": step}
        for part in self.parts:
            state |= part.state_dict()
        return state

    def _say_resumed(self, same_layout: bool) -> None:
        """Print where the run resumes, and every key whose value changed since the checkpoint."""
        start, say = self.folder.start, self.logger.say
        say(f"resuming after step {start.step}, from {start.path}")
        saved, present = self.folder.saved["config"], dataclasses.asdict(self.config)
        before, now = flat_settings(without_secrets(saved)), flat_settings(without_secrets(present))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key) and key not in MAY_CHANGE and not self.config.ignores(key):
                say(f"  {key} was {before.get(key)}, is {now.get(key)}")
        if not same_layout:
            say("  random generators start from their seed: they were saved for another layout")

    def _save_now(self, state: dict[str, Any]) -> None:
        self.settle()
        if not step_folder(self.root, state["step"]).exists():
            self._begin(state)
            self.settle()

    def _begin(self, state: dict[str, Any]) -> None:
        """Start a save. Unless a role saves in the background, it is complete when this returns."""
        self.settle()
        self.logger.keep_folder()
        started = time.monotonic()
        with self._storing(state["step"]):
            folder = unfinished_folder(self.root, state["step"])
            shutil.rmtree(folder, ignore_errors=True)
            for role in self._trained:
                (folder / role).mkdir(parents=True)
            saving = [host.begin_save(folder) for host in self.hosts.values()]
            roles = {role: numbers for future in saving for role, numbers in future.get()[0].items()}
            for role in roles:
                write_role_file(folder, role, state["step"])
            self._drawn_files = self._write_own_part(folder, state, roles)
            self._under_way = Manifest(FORMAT, state["step"], self.folder.models, files={})
        if not self._saves_beside_training:
            self.settle()
        self.stop_policy.save_seconds = time.monotonic() - started

    def _keep_for_repairs(self, step: int, is_saved: bool) -> None:
        """Copy the state after a step, unless a complete checkpoint has it. Raises NodesReturned."""
        copies = self.repairs.copies_after(step) and not is_saved
        if copies:
            self._copy(self._state(step))
        self.repairs.took(step)
        if (copies or is_saved) and not self.stop_policy.stop.is_set and step < self.config.trainer.num_steps:
            self.repairs.raise_if_nodes_returned()

    def _copy(self, state: dict[str, Any]) -> None:
        """Copy the state into host memory. A run that is repaired resumes from there."""
        started = time.monotonic()
        folder = self.repairs.new_folder(state["step"])
        copying = [host.copy_state(self.repairs.place(), state["step"]) for host in self.hosts.values()]
        reports = [future.get() for future in copying]
        self._write_own_part(folder, state, {role: numbers for ranks in reports for role, numbers in ranks[0].items()})
        self.repairs.keep(state["step"], folder, dict(zip(self.hosts, map(len, reports), strict=True)))
        self.logger.next_metrics["repair/copy_seconds"] = time.monotonic() - started

    def _write_own_part(self, folder: Path, state: dict[str, Any], roles: Mapping[str, RoleState]) -> list[str]:
        """Write the controller's state and what was generated ahead; returns the names of the latter's files."""
        content = {
            "run": state,
            "roles": {role: dataclasses.asdict(numbers) for role, numbers in roles.items()},
            "config": without_secrets(dataclasses.asdict(self.config)),
        }
        (folder / RUN_FILE).write_text(json.dumps(content, indent=1))
        with self.drawn.saving(state["step"]):
            return self.drawn.write(folder, state["step"])

    def _try_to_finish(self, wait: bool) -> None:
        if self._under_way is None:
            return
        with self._storing(self._under_way.step):
            finishing = [host.finish_save(wait) for host in self.hosts.values()]
            answers = [report for future in finishing for report in future.get()]
            reports = [report for report in answers if report is not None]
            if len(reports) < len(answers):
                return
            manifest, self._under_way = self._under_way, None
            folder = unfinished_folder(self.root, manifest.step)
            files: dict[str, FileRecord] = {name: record for report in reports for name, record in report.items()}
            owners = [f"{role}/{ROLE_FILE}" for role in self._trained]
            names = [RUN_FILE, *self._drawn_files, *owners, *copy_model_files(self._trained, folder)]
            commit(folder, dataclasses.replace(manifest, files=files | digest_files(folder, names)))
            remove_old(self.root, self.config.trainer.max_ckpt_to_keep, self.best())

    @contextmanager
    def _storing(self, step: int) -> Iterator[None]:
        """Remove the unfinished checkpoint of `step` if the body raises StorageError."""
        try:
            with storing(step_folder(self.root, step).name, self.root):
                yield
        except StorageError:
            shutil.rmtree(unfinished_folder(self.root, step), ignore_errors=True)
            raise


def copy_model_files(trained: Mapping[str, str], folder: Path) -> list[str]:
    """Copy configuration and tokenizer of each role next to its weights; returns the files' paths in `folder`.

    trained: role -> the Hugging Face folder that it starts from.
    """
    from megatron_rl.checkpoint.constants import keep_constants
    from megatron_rl.checkpoint.pass_through import keep_carried

    names = []
    for role, path in trained.items():
        target = folder / role / HF_FOLDER
        target.mkdir(exist_ok=True)
        for file in sorted(Path(path).iterdir()):
            if file.suffix in MODEL_FILES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)
                names.append(f"{role}/{HF_FOLDER}/{file.name}")
        for keep in (keep_constants, keep_carried):
            kept = keep(Path(path), target)
            names += [] if kept is None else [f"{role}/{HF_FOLDER}/{kept}"]
    return names
