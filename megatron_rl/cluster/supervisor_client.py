"""Client of a node's supervisor process: starts it, asks it to start ranks, and talks to those ranks over pipes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.cluster.child_processes import how_ended, kill_group
from megatron_rl.cluster.launcher import VISIBLE_GPUS, ProcessInfo, Way
from megatron_rl.cluster.loading import COMPILED, folder_of_ranks, import_path
from megatron_rl.cluster.rank_messages import ProcessDied, answer_of
from megatron_rl.cluster.rank_pipes import NOW, PipeReader, RankPipe, header_of
from megatron_rl.cluster.scratch import Scratch
from megatron_rl.cluster.shm_files import MappedFiles
from megatron_rl.cluster.stale_processes import RUN_ID, end, processes_with
from megatron_rl.cluster.supervisor import LARGEST, SUPERVISOR
from megatron_rl.errors import ConfigError, RewardError, StoppedAfterStep, StoppedBeforeStep, WorkerFailure

OF_DRIVER = "supervisor"
"""The name of the supervisor that the driver starts."""

CONNECT_LIMIT_S = 60.0
END_LIMIT_S = 40.0
"""Seconds that a supervisor has to end a run's processes on its machine."""

READ_HERE = partial(answer_of, files=MappedFiles())
"""Makes a result from a reply of a rank on this machine."""

NO_FAULT_OF_PROCESSES = (ConfigError, RewardError, StoppedAfterStep, StoppedBeforeStep)
"""Errors whose reason is not in the logs of processes."""


class SupervisorClient:
    """Connects to the supervisor of a run on this node and starts one if there is none; `close` ends both.

    modules: a supervisor that is started here imports them and forks ranks; without any, each rank imports for itself.
    variables: environment variables that the modules read on import. A supervisor that exists already keeps its own.
    name: of the supervisor among those of the run on this machine. owns_run: this is the driver. Raises WorkerFailure
    if no supervisor replies; the driver's folder is removed then.
    """

    def __init__(
        self,
        scratch: Scratch,
        modules: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        *,
        name: str = OF_DRIVER,
        owns_run: bool = False,
    ) -> None:
        self.scratch = scratch
        # Agents of a run are processes of the run, too: only its driver may end all of them.
        self._mark = (scratch.run_id, RUN_ID) if owns_run else (f"{scratch.run_id}/{name}", SUPERVISOR)
        self._process = _start(scratch, name, modules, variables or {})
        try:
            self._control = _connect(scratch.folder / name, self._process)
        except WorkerFailure:
            self._end_supervisor()
            if owns_run:
                scratch.remove(keep_logs=True)
            raise
        self._pipes = PipeReader()
        self._requests = threading.Lock()
        self._starting: deque[LocalRankProcess] = deque()
        self._running: dict[int, LocalRankProcess] = {}
        self._reader = threading.Thread(target=self._read, name="supervision", daemon=True)
        self._reader.start()
        if owns_run:
            self._send({"owns": True})

    @property
    def pid(self) -> int | None:
        """The supervisor's process id; None if another client has started it."""
        return None if self._process is None else self._process.pid

    def start(
        self,
        variables: Mapping[str, str],
        node_id: str,
        host: str,
        gpu: str = "",
        read: Callable[[bytes], Any] | None = None,
    ) -> LocalRankProcess:
        """Start a rank with these variables, which sees this GPU alone; do not wait for it.

        node_id, host: this node, for `ProcessInfo`. gpu: "" on CPUs. read: makes a result of a reply; else READ_HERE.
        Raises WorkerFailure if the supervisor is gone.
        """
        ours, theirs = socket.socketpair()
        describe = partial(ProcessInfo, node_id=node_id, host=host)
        process = LocalRankProcess(ours, describe, read or READ_HERE, self._pipes)
        self._request(process, theirs, variables, gpu)
        return process

    def start_with(
        self, gpu: Future[str], variables: Mapping[str, str], node_id: str, host: str, read: Callable[[bytes], Any]
    ) -> LocalRankProcess:
        """Start a rank as `start` does, once its GPU is known; what fails until then is how the process has ended."""
        ours, theirs = socket.socketpair()
        process = LocalRankProcess(ours, partial(ProcessInfo, node_id=node_id, host=host), read, self._pipes)

        def ask(assigned: Future[str]) -> None:
            try:
                self._request(process, theirs, variables, assigned.result())
            except (ProcessDied, WorkerFailure) as error:
                theirs.close()
                process.end_unstarted(str(error))

        gpu.add_done_callback(ask)
        return process

    def _request(self, process: LocalRankProcess, pipe: socket.socket, variables: Mapping[str, str], gpu: str) -> None:
        """Ask for a process at the other end of its pipe, unless it was killed meanwhile.

        Raises WorkerFailure if the supervisor is gone.
        """
        with pipe:
            if not process.may_start(gpu):
                return
            log = self.scratch.folder / f"rank_{variables['RANK']}_{time.time_ns()}.log"
            place = {"TMPDIR": str(self.scratch.folder), COMPILED: os.environ.get(COMPILED, folder_of_ranks())}
            seen = {VISIBLE_GPUS: gpu} if gpu else {}
            request = json.dumps({"start": {**place, **variables, **seen}, "log": str(log)}).encode()
            with self._requests:
                self._starting.append(process)
                try:
                    socket.send_fds(self._control, [request], [pipe.fileno()])
                except OSError:
                    self._starting.pop()
                    raise WorkerFailure("the supervisor of this machine's ranks is gone; start the run again") from None

    def watch(self, pids: Sequence[int]) -> None:
        """Have processes killed when this process ends."""
        self._send({"watch": list(pids)})

    def end_run(self, error: BaseException | None) -> None:
        """Close, and remove the run's folder; keep the logs of processes if they may tell the reason of an error."""
        self.close(keeps_folder=True)
        self.scratch.remove(keep_logs=isinstance(error, Exception) and not isinstance(error, NO_FAULT_OF_PROCESSES))

    def close(self, keeps_folder: bool = False) -> None:
        """End the ranks that were started here, and, with the last client, all processes of the run on this machine.

        keeps_folder: the caller removes the scratch folder. A second call does nothing.
        """
        if keeps_folder:
            self._send({"keeps": True})
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._control.close()
        self._pipes.close()
        self._end_supervisor()

    def _end_supervisor(self) -> None:
        """Tell the supervisor that its starter has ended, and wait for its end; no-op where another one started it."""
        if self._process is not None:
            process, self._process = self._process, None
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=END_LIMIT_S)
            if process.returncode != 0:  # it was killed, or hangs
                end(lambda: processes_with(*self._mark), END_LIMIT_S)

    def _send(self, request: dict[str, Any]) -> None:
        with suppress(OSError), self._requests:
            self._control.sendall(json.dumps(request).encode())

    def _read(self) -> None:
        """Pass the supervisor's replies on until it, or this end, is closed; then every rank is killed."""
        while True:
            content = b""
            with suppress(OSError):
                content = self._control.recv(LARGEST)
            if not content:
                break
            answer = json.loads(content)
            if "ended" in answer:
                self._running.pop(answer["ended"]).end(answer["status"])
            else:
                process = self._starting.popleft()
                self._running[answer["pid"]] = process
                process.begin(answer["pid"])
        for process in (*self._running.values(), *self._starting):
            process.end(signal.SIGKILL)


class Pipes:
    """The route to ranks of this machine: each has a pipe of its own."""

    def send(self, messages: Sequence[tuple[LocalRankProcess, bytes]]) -> list[Future[Any]]:
        return [process.send(message) for process, message in messages]


PIPES = Pipes()


class LocalRankProcess:
    """A rank on this machine (see `launcher.RankProcess`). pipes: the thread that reads its pipe."""

    def __init__(
        self, pipe: socket.socket, info: Callable[..., ProcessInfo], read: Callable[[bytes], Any], pipes: PipeReader
    ) -> None:
        self.route: Way = PIPES
        self._gpu: str | None = None  # until the process is asked for
        self._reason = ""
        self.info: Future[ProcessInfo] = Future()
        self.ended: Future[str] = Future()
        self._describe, self._read_reply = info, read
        self._pipe = pipe
        self._is_read = False  # to its end
        self._waiting: deque[Future[Any]] = deque()
        self._changing = threading.Lock()
        self._kills = False
        # A rank reads a message when it has answered those before; until then a large one fills the pipe.
        self._writer, self._num_unsent = ThreadPoolExecutor(1, "rank writer"), 0
        pipes.add(RankPipe(pipe, self._answer, self._note_read))

    def send(self, message: bytes) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._changing:
            if self.ended.done():
                answer.set_exception(ProcessDied(self.ended.result()))
                return answer
            self._waiting.append(answer)
            self._send(message)
        return answer

    def kill(self, reason: str = "") -> None:
        """Kill it; reason: the message of its failed calls, in place of the signal."""
        with self._changing:
            self._kills, self._reason = True, self._reason or reason
            if self.info.done() and not self.ended.done():
                kill_group(self.info.result().pid)
        self.end_unstarted(reason or "it was killed before its start")

    def may_start(self, gpu: str) -> bool:
        """Note that the process is asked for, with this GPU; returns whether it may be."""
        with self._changing:
            if not self.ended.done():
                self._gpu = gpu
        return self._gpu is not None

    def begin(self, pid: int) -> None:
        """Note that the process is up."""
        with self._changing:
            self.info.set_result(self._describe(pid, gpus=self._gpu))
            if self._kills:
                kill_group(pid)

    def end(self, status: int) -> None:
        """Note how the process has ended, as `os.waitpid` says."""
        with self._changing:
            self._end(self._reason or f"it {how_ended(os.waitstatus_to_exitcode(status))}")
        self._fail_waiting()

    def end_unstarted(self, how: str) -> None:
        """Note why the process does not start, unless it was asked for or this has been said."""
        with self._changing:
            if self._gpu is None and not self.ended.done():
                self._end(how)

    def _end(self, how: str) -> None:
        self.ended.set_result(how)
        if not self.info.done():
            self.info.set_exception(ProcessDied(how))
        with suppress(OSError):  # its children may hold the other end open
            self._pipe.shutdown(socket.SHUT_RDWR)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _send(self, message: bytes) -> None:
        """Write what the pipe takes now, and have a thread write the rest."""
        header, sent = header_of(len(message)), 0
        if not self._num_unsent:
            try:
                sent = self._pipe.sendmsg([header, message], (), NOW)
            except BlockingIOError:
                pass
            except OSError:  # the end of the pipe reports it
                return
        if sent < len(header) + len(message):
            self._num_unsent += 1
            self._writer.submit(self._write, header, message, sent)

    def _write(self, header: bytes, message: bytes, sent: int) -> None:
        with suppress(OSError):
            self._pipe.sendall(header[sent:])
            self._pipe.sendall(memoryview(message)[max(0, sent - len(header)) :])
        with self._changing:
            self._num_unsent -= 1

    def _answer(self, reply: bytes) -> None:
        """Pass a reply on. What it holds is freed when its reader drops it, so nothing here may refer to it."""
        answer = self._waiting.popleft()
        try:
            answer.set_result(self._read_reply(reply))
        except Exception as error:
            answer.set_exception(error)

    def _note_read(self) -> None:
        """Note that no more replies come."""
        with self._changing:
            self._is_read = True
            self._pipe.close()
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        """Fail the calls without a reply once all replies were read and it is known how the process has ended."""
        with self._changing:
            if not (self._is_read and self.ended.done()):
                return
            waiting, self._waiting = self._waiting, deque()
        for answer in waiting:
            answer.set_exception(ProcessDied(self.ended.result()))


def _start(
    scratch: Scratch, name: str, modules: Sequence[str], variables: Mapping[str, str]
) -> subprocess.Popen[bytes] | None:
    """Start a supervisor; None if the run has one of that name on this machine."""
    claim = scratch.claim(name)
    if claim is None:
        return None
    own = {**os.environ, "PYTHONPATH": import_path(), **variables, RUN_ID: scratch.run_id}
    own["TMPDIR"] = str(scratch.folder.parents[1])  # where the run's folder is found
    command = [sys.executable, "-m", "megatron_rl.cluster.supervisor", name, ",".join(modules)]
    log = os.open(scratch.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # Signals to the driver's process group must not end it: its own session. Ranks are not stopped by a SIGTERM either.
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=own, pass_fds=[claim], start_new_session=True
        )
    finally:
        os.close(claim)
        os.close(log)


def _connect(path: Path, process: subprocess.Popen[bytes] | None) -> socket.socket:
    """Connect to a supervisor, which may still be starting. Raises WorkerFailure where none listens.

    process: the supervisor, where this process has started it.
    """
    deadline = time.monotonic() + CONNECT_LIMIT_S
    while True:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            control.connect(str(path))
        except OSError as error:
            control.close()
            if process is not None and process.poll() is not None:
                lines = path.with_name(f"{path.name}.log").read_text(errors="replace").split("\n")
                how, why = how_ended(process.returncode), "".join(f": {line}" for line in lines[-2:-1])
                raise WorkerFailure(
                    f"the supervisor of this machine's ranks (process {process.pid}) {how} while it started{why}; "
                    "start the run again"
                ) from None
            if time.monotonic() > deadline:
                raise WorkerFailure(
                    f"no supervisor responds at {path} ({error.strerror}): see {path.name}.log"
                ) from None
            time.sleep(0.02)
        else:
            return control
