"""Start the command line as a user would, watch its whole family of processes, and prove that none outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from forked_run import LIMIT, ForkedRun

from megatron_rl.cluster.scratch import SEGMENTS
from megatron_rl.cluster.stale_processes import RUN_ID, end, processes_with

REPOSITORY = Path(__file__).parents[2]
TAG = "MEGATRON_RL_TEST_TAG"


class CommandLine:
    """One `megatron_rl train` on the demo assets, in its own session; every process it starts carries a tag.

    Several in one `folder`, one after the other, are lives of the same run, whose own folder is `run`. The command is
    forked from a server that has its imports.
    """

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        config: str = "configs/demo_cpu.yaml",
        command: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        names_folder: bool = True,
        stage: str = "train",
    ) -> None:
        """`command`: what takes the overrides, instead of `megatron_rl train`; `variables`: its environment.

        names_folder: tell it where its run goes. stage: sft, reward or dpo instead of train.
        """
        self.tag = uuid.uuid4().hex
        self.folder = folder
        self.run = folder / "run"
        self.output = folder / f"output_{len(list(folder.glob('output_*')))}.txt"
        self.started = time.monotonic()
        self.run_ids: set[str] = set()  # of the family that was seen, see `cluster/scratch.py`
        arguments = [*overrides, *([f"trainer.default_local_dir={self.run}"] if names_folder else [])]
        self.process: subprocess.Popen | ForkedRun
        environment = {TAG: self.tag, "COLUMNS": "200"} | dict(variables or {})
        if not command:
            self.process = ForkedRun([stage, "--config", config, *arguments], REPOSITORY, environment, self.output)
            return
        self.process = subprocess.Popen(
            [*(command or (sys.executable, "-m", "megatron_rl", stage, "--config", config)), *arguments],
            cwd=REPOSITORY,
            env=os.environ | environment,
            stdout=self.output.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def family(self) -> list[psutil.Process]:
        """Every living process that inherited this run's tag, and a forked one, which was not started with it."""
        members = processes_with(self.tag, TAG)
        for process in members:
            with suppress(psutil.Error):  # it has just ended
                self.run_ids |= {run_id for name, run_id in process.environ().items() if name == RUN_ID}
        if isinstance(self.process, ForkedRun) and self.process.poll() is None:
            members.append(psutil.Process(self.process.pid))
        return members

    def workers(self) -> list[psutil.Process]:
        """The processes of the ranks."""
        found = []
        for process in self.family():
            with suppress(psutil.Error):  # it has just ended
                if is_rank(process):
                    found.append(process)
        return found

    def titles(self) -> list[str]:
        """The command lines of the family, or what its processes have made of them."""
        found = []
        for process in self.family():
            with suppress(psutil.Error):  # it has just ended
                found.append(" ".join(process.cmdline()))
        return found

    def wait_for(self, condition, timeout: float = LIMIT, may_end: bool = False, interval: float = 0.2) -> None:
        """Poll until `condition()` is true; AssertionError with the output when the run ends first or it is too late.

        may_end: the condition itself makes the run end, so both may be seen at once. interval: seconds between looks.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            ended = self.process.poll() is not None
            assert not ended or (may_end and condition()), f"the run ended early:\n{self.text()}"
            assert time.monotonic() < deadline, f"waited {timeout} s:\n{self.text()}"
            time.sleep(interval)

    def wait(self, timeout: float = LIMIT) -> int:
        """Exit code; AssertionError when it takes longer."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text()

    def metrics(self) -> str:
        file = self.run / "metrics.jsonl"
        return file.read_text() if file.exists() else ""

    def files(self) -> list[str]:
        """Folders and shared memory of the runs whose processes `family` has seen."""
        folders = [
            path for run_id in self.run_ids for path in Path(tempfile.gettempdir()).glob(f"megatron_rl-*/{run_id}")
        ]
        segments = [path for run_id in self.run_ids for path in SEGMENTS.glob(f"megatron_rl-{run_id}-*")]
        return [str(path) for path in folders + segments]

    def left_over(self, patience: float = 60) -> list[str]:
        """Command lines of processes, and files, that outlive the run by more than `patience` seconds."""
        deadline = time.monotonic() + patience
        while (left := [*self.files(), *self.titles()]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def kill_all(self) -> None:
        assert end(self.family) == []


def is_rank(process: psutil.Process) -> bool:
    """Whether a process is a rank's, and not one that it has started."""
    return bool(process.name().startswith("rank "))


def is_in(process: psutil.Process, method: str) -> bool:
    """Whether a rank is in a method, ROLE.METHOD, as its title says: rank 1 of global_pool: actor.update."""
    return "".join(process.cmdline()[:1]).endswith(f": {method}")


def stopped_in(ranks: Sequence[psutil.Process], method: str) -> psutil.Process | None:
    """The first of the ranks' processes that is in a method, stopped there; None where there is none now."""
    for process in ranks:
        with suppress(psutil.Error):  # it has just ended
            if is_in(process, method):
                process.suspend()
                if is_in(process, method):
                    return process
                process.resume()
    return None
