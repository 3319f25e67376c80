"""Continue after a process or node was lost: start the ranks again, from copies in host memory or the newest
checkpoint.

An attempt is one start of a run's ranks. The launcher, the copies in the nodes' memory, the request to stop, and the
controller's part of the two newest copies are kept from one attempt to the next. A run on fewer nodes has fewer
data-parallel ranks, and more micro-batches of the same samples.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from megatron_rl.checkpoint.memory_checkpoint_plan import CopyPlace, files_of, is_whole
from megatron_rl.checkpoint.model_folder import model_folders
from megatron_rl.cluster.launcher import Launcher
from megatron_rl.cluster.signals import StopRequest, graceful_signals
from megatron_rl.config.roles import PoolSize, needed_pools
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.errors import (
    ConfigError,
    CopyLost,
    DeviceFault,
    MegatronRLError,
    StoppedAfterStep,
    StoppedBeforeStep,
    WorkerFailure,
)
from megatron_rl.observe.appended_file import opened_to_append
from megatron_rl.observe.terminal import warn
from megatron_rl.planning.preflight import preflight

Result = TypeVar("Result")

REPAIRS_FILE = "repairs.jsonl"
"""A line for every repair, in the run's folder."""

MOST_IDLE = 3
"""Repairs in a row after which no step was taken; then the reason is not an accident."""

_LOOK_S = 0.5


@dataclass(frozen=True)
class KeptCopy:
    """The controller's part of a copy of the state. folder: run.json and responses. num_ranks: pool -> its ranks."""

    attempt: int
    step: int
    folder: Path
    num_ranks: Mapping[str, int]


@dataclass
class Repair:
    """One repair. source: copy | checkpoint | start. step: after which the run continued. seconds: until then."""

    reason: str
    source: str = "start"
    step: int = 0
    steps_lost: int = 0
    seconds: float = 0.0

    def metrics(self, number: int) -> dict[str, float]:
        """Metrics of the first step after repair number `number`."""
        return {"repair/number": number, "repair/steps_lost": self.steps_lost, "repair/seconds": self.seconds}


class NodesReturned(Exception):
    """A run on fewer nodes than it was given can have all of them again; its newest step is copied or saved."""


class FaultHistory:
    """The faults of GPUs that a run has seen."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], set[tuple[str, str]]] = {}

    def is_code(self, fault: DeviceFault, step: int) -> bool:
        """Note a fault in the step after `step`; return whether another GPU had it there, so that the code has it."""
        gpus = self._seen.setdefault((fault.kind, step), set())
        gpus.add((fault.node, fault.gpu))
        return not fault.is_certain and len(gpus) > 1


class Repairs:
    """The state of a run that is kept when its ranks are started again; a context manager around all attempts.

    config: of the present attempt, which may have fewer nodes. stop: the request to stop. attempt: number of the
    present start, from 0. folders: that roles start from. started: time of the first, on the monotonic clock. all: the
    repairs so far. unrepaired: the loss after which the present attempt only saves.
    """

    def __init__(self, config: RunConfig, stop: StopRequest, local: bool) -> None:
        self.stop = stop
        self.attempt = 0
        self.started = time.monotonic()
        self.all: list[Repair] = []
        self.config = self._full = config
        self._is_on = config.trainer.max_repairs > 0 and not local
        self._open = ExitStack()
        self._launcher: Launcher | None = None
        self._kept: list[KeptCopy] = []
        self._last_step, self._num_idle = 0, 0
        self._faults = FaultHistory()
        self.unrepaired: WorkerFailure | None = None
        self._lost_at: float | None = None
        self._read: dict[str, Any] = {}
        self.folders = model_folders(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._open.__exit__(*failure)

    @property
    def _trainer(self) -> TrainerConfig:
        return self._full.trainer

    # Used by an attempt

    def launcher(self, make: Callable[[], Launcher]) -> AbstractContextManager[Launcher]:
        """Return a context manager that gives the launcher: a new one, or that of the attempts before."""
        if not self._is_on:
            return make()
        if self._launcher is None:
            self._launcher = self._open.enter_context(make())
        return nullcontext(self._launcher)

    def once(self, name: str, read: Callable[[], Result]) -> Result:
        """Return what `read` has returned in the first attempt, as files take time. Nobody changes what is read."""
        if name not in self._read:
            self._read[name] = read()
        result: Result = self._read[name]
        return result

    @property
    def kept(self) -> KeptCopy | None:
        """The newest copy that an attempt may begin with."""
        return self._kept[-1] if self._kept else None

    def copies_after(self, step: int) -> bool:
        """Whether the state after a step is to be copied."""
        return self._is_on and self._trainer.copy_freq > 0 and step % self._trainer.copy_freq == 0

    def place(self, attempt: int | None = None) -> CopyPlace:
        """Where copies of an attempt are; None: of the present one."""
        assert self._launcher is not None, "no rank was started"
        return CopyPlace(self._launcher.scratch.segment_prefix, self.attempt if attempt is None else attempt)

    def new_folder(self, step: int) -> Path:
        """Make an empty folder for the controller's part of a copy."""
        assert self._launcher is not None, "no rank was started"
        folder = self._launcher.scratch.folder / "copies" / f"{self.attempt}_{step}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def keep(self, step: int, folder: Path, num_ranks: Mapping[str, int]) -> None:
        """Note a copy that all ranks have made; only the two newest are kept."""
        assert self._launcher is not None, "no rank was started"
        self._kept.append(KeptCopy(self.attempt, step, folder, num_ranks))
        for old in self._kept[:-2]:
            shutil.rmtree(old.folder, ignore_errors=True)
        del self._kept[:-2]

    def took(self, step: int) -> None:
        """Note that a step is over."""
        self._last_step, self._num_idle = step, 0

    def begun(self, step: int, source: str, folder: Path) -> dict[str, float]:
        """Note that ranks are ready for the step after `step`; returns metrics of that step, {} in the first attempt.

        Adds a line to `repairs.jsonl` in the run's folder.
        """
        if self._launcher is not None:
            self._launcher.hold_nodes()  # before ranks can end
        if self._lost_at is None:
            return {}
        repair = self.all[-1]
        repair.source, repair.step, repair.steps_lost = source, step, max(0, self._last_step - step)
        repair.seconds, self._lost_at = round(time.monotonic() - self._lost_at, 2), None
        try:
            with opened_to_append(folder / REPAIRS_FILE) as file:
                file.write(json.dumps({"number": len(self.all), **asdict(repair)}).encode() + b"\n")
        except OSError as error:  # the summary has it too, and the next checkpoint reports a full disk
            warn(f"{folder / REPAIRS_FILE} is missing repair {len(self.all)}: {error.strerror}")
        return repair.metrics(len(self.all))

    # Between two attempts

    def prepare(self, failure: WorkerFailure) -> None:
        """Decide from what the next attempt begins, and wait until nodes have room for it.

        Raises `failure` where it would happen again, where there were too many, or where nodes are missing for too
        long.
        """
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        launcher = self._launcher
        is_repairable = failure.is_loss or isinstance(failure, CopyLost)
        # A run that is to stop is repaired only to save what a copy has.
        has_nothing_to_save = self.stop.is_set and not self._kept
        if launcher is None or launcher.is_lost or not is_repairable or has_nothing_to_save or self.unrepaired:
            raise self.unrepaired or failure
        if len(self.all) == self._trainer.max_repairs:
            warn(f"not repaired: it is loss {len(self.all) + 1}, and trainer.max_repairs={self._trainer.max_repairs}")
            raise failure
        self._num_idle += 1
        if self._num_idle > MOST_IDLE:
            warn(f"not repaired: {MOST_IDLE} repairs in a row did not lead to another step")
            raise failure
        reason = str(failure).splitlines()[0]
        self.all.append(Repair(reason))
        warn(f"repair {len(self.all)} of at most {self._trainer.max_repairs}: {reason}")
        if isinstance(failure, CopyLost):
            self._kept.clear()
        if failure.device_fault is not None:
            self._leave_out(failure.device_fault, launcher, failure)
        self.wait_for_room(failure)
        self._drop_torn(launcher)
        self.attempt += 1

    def _leave_out(self, fault: DeviceFault, launcher: Launcher, failure: WorkerFailure) -> None:
        """Give the broken GPU to no rank any more. Raises `failure` where the fault is in the code."""
        if self._faults.is_code(fault, self._last_step):
            warn(f"not repaired: {fault.kind}, in the same step on another GPU: the code does it, not the GPU")
            raise failure
        if fault.gpu:
            launcher.leave_out(fault.node, fault.gpu)
            warn(f"{fault.where} reported: {fault.kind}; no rank gets it any more")

    def _save_alone(self, failure: WorkerFailure, missing: str) -> None:
        """Start the ranks once more, also on GPUs that were left out, to save the newest copy. Raises `failure` where
        there is nothing to save, or no GPU was left out.
        """
        assert self._launcher is not None, "no rank was started"
        if failure.device_fault is None or not self._kept or self._trainer.save_freq < 1:
            raise failure
        warn(f"no other GPU is free: {missing}; the run saves its newest copy and ends")
        self._launcher.take_back()
        self.unrepaired = failure
        self.stop.ask(missing)

    def wait_for_room(self, failure: WorkerFailure) -> None:
        """Wait until living nodes have room for all pools; after `trainer.repair_wait_s` take fewer nodes.

        Raises `failure` where there are too few for every layout that preflight accepts.
        """
        assert self._launcher is not None, "no rank was started"
        wait_s, is_waiting = self._trainer.repair_wait_s, False
        deadline = time.monotonic() + wait_s
        while missing := self._shortage_of_known():
            if self.stop.is_set:
                raise failure
            if time.monotonic() > deadline or not self._launcher.may_grow:
                fitting = (
                    fewer for fewer in on_fewer_nodes(self.config) if not self._launcher.shortage(needed_sizes(fewer))
                )
                fewer = next(fitting, None)
                if fewer is None:
                    waited = f" after trainer.repair_wait_s={wait_s:g} s" if self._launcher.may_grow else ""
                    warn(f"not repaired{waited}: {missing}")
                    self._save_alone(failure, missing)
                    return
                warn(f"continuing with trainer.nnodes={fewer.trainer.nnodes} after {wait_s:g} s: {missing}")
                self.config = fewer
                return
            if not is_waiting:
                warn(f"waiting up to {wait_s:g} s for nodes: {missing}")
                is_waiting = True
            time.sleep(_LOOK_S)

    def _shortage_of_known(self) -> str:
        """Choose the full layout if nodes have room for it, else the present one; return "" or why neither fits."""
        assert self._launcher is not None, "no rank was started"
        missing = self._launcher.shortage(needed_sizes(self._full))
        if not missing:
            self.config = self._full
        elif self.config is not self._full:
            missing = self._launcher.shortage(needed_sizes(self.config))
        return missing

    def raise_if_nodes_returned(self) -> None:
        """Raise NodesReturned if the run has fewer nodes than it was given and could have all of them again.

        Call it when the newest step is copied or saved.
        """
        if self.config is self._full or self._launcher is None:
            return
        if not self._launcher.shortage(needed_sizes(self._full)):
            raise NodesReturned

    def grow(self) -> None:
        """Let the next attempt have all nodes."""
        assert self._launcher is not None, "no rank was started"
        warn(f"nodes are back: continuing with trainer.nnodes={self._full.trainer.nnodes}")
        self.config = self._full
        self._drop_torn(self._launcher)
        self.attempt += 1

    def _drop_torn(self, launcher: Launcher) -> None:
        """Forget kept copies whose files living nodes do not have."""
        held = [file for node, names in launcher.segments().items() for file in files_of(names, node)]
        self._kept = [copy for copy in self._kept if is_whole(held, copy.attempt, copy.step, copy.num_ranks)]


@contextmanager
def repairs_of(config: RunConfig, local: bool = False) -> Iterator[Repairs]:
    """Yield a run's `Repairs`, with its signals handled; the main thread must enter it.

    local: one rank in this process, which cannot be repaired. A run that saves nothing stops at once after a signal.
    """
    trainer = config.trainer
    grace_s = trainer.stop_grace_s if trainer.save_freq > 0 else None
    with graceful_signals(grace_s) as stop, Repairs(config, stop, local) as repairs:
        yield repairs


def with_repairs(config: RunConfig, local: bool, run_once: Callable[[Repairs], Result]) -> Result:
    """Call `run_once` until it returns: once, and again after each loss that can be repaired. Raises its errors."""
    with repairs_of(config, local) as repairs:
        loss: WorkerFailure | None = None
        while True:
            try:
                return run_once(repairs)
            except (StoppedAfterStep, StoppedBeforeStep) as stopped:
                if repairs.unrepaired is None:
                    raise
                raise WorkerFailure(
                    f"{repairs.unrepaired}\nnot repaired: {repairs.stop.own_reason}; {stopped}"
                ) from None
            except (WorkerFailure, ConfigError) as error:
                loss = repairable(error, loss)
                loss.__context__ = loss.with_traceback(None).__cause__ = None  # their frames have the run's batches
                repairs.prepare(loss)
            except NodesReturned:
                repairs.grow()


def repairable(error: MegatronRLError, loss: WorkerFailure | None) -> WorkerFailure:
    """The loss to repair: `error`, or the loss before where nodes went away while ranks started. Raises `error`."""
    if isinstance(error, WorkerFailure):
        return error
    if loss is not None and isinstance(error, ConfigError) and error.is_shortage:
        return loss
    raise error


def on_fewer_nodes(config: RunConfig) -> Iterator[RunConfig]:
    """Yield copies of the configuration with fewer nodes of global_pool that preflight accepts, the largest first.

    Batches keep their samples, mini-batches and micro-batches their sizes: what changes is who computes them.
    """
    for num_nodes in range(config.trainer.nnodes - 1, 0, -1):
        fewer = copy.deepcopy(config)
        fewer.trainer.nnodes = num_nodes
        if not preflight(fewer):
            yield fewer


def needed_sizes(config: RunConfig) -> Sequence[PoolSize]:
    """Sizes of the pools that a run needs."""
    return [pool.size for pool in needed_pools(config)]
