"""Ray for as long as it is needed: started on this machine, or joined where RAY_ADDRESS names a running cluster.

`ray.init` alone does not suffice for the Ray that is started here (2.60, as measured). Its daemons are in the driver's
process group, so Ctrl-C or a scheduler's signal ends them while the driver saves. They listen on all interfaces. Three
more processes are started that a run does not use, with 270 MB and 1.3 CPU seconds. Its token goes to the home folder,
which may not exist. And a driver whose daemon has died waits for a minute, and is aborted. Against these are the
patches of `third_party_patches.ray`, `_own_token` and `ray_watchdog`. `ray start` in a process of its own costs another
Python and still starts the dashboard's server; joining alone would leave all this to the user.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Self

import psutil
import ray
from ray._common.usage.usage_lib import get_cluster_metadata
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.services import find_node_ids
from ray._private.worker import BaseContext
from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]  # its stub does not have both
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import AuthenticationError, RayError

from megatron_rl.cluster import ray_address
from megatron_rl.cluster.launcher import ProcessInfo
from megatron_rl.cluster.ray_remote_columns import RayRemoteColumns
from megatron_rl.cluster.ray_watchdog import DaemonMonitor, family, owner
from megatron_rl.cluster.ray_watchdog import children as daemon_children
from megatron_rl.cluster.scratch import Scratch
from megatron_rl.cluster.signals import keeping_sigterm_handler
from megatron_rl.cluster.stale_processes import RUN_ID, descendants, end, processes_with
from megatron_rl.cluster.supervisor_client import SupervisorClient
from megatron_rl.errors import ConfigError, WorkerFailure
from third_party_patches import PatchError, apply_patches

CONNECT_LIMIT_S = 5.0
ANSWER_LIMIT_S = 15.0
JOIN_LIMIT_S = 5.0
"""Seconds. Nodes may still be joining when a run starts."""

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",  # a run does not use metrics, and their port asks for no token
    "RAY_worker_niceness": "0",  # ranks are the machine's main work
    "RAY_enable_worker_prestart": "0",  # ranks have environments of their own, for which no worker waits
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about this setting
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # replies of a failed call that are never read
}


class RaySession:
    """Ray inside a `with` block. Leaving it shuts Ray down, unless this process had initialised Ray before, and
    restores Ray's environment variables.

    num_ranks: of all pools; a Ray started here has a CPU for each rank. modules, variables: see `SupervisorClient`; the
    supervisor of this machine starts here, so that it imports them while Ray starts.
    """

    def __init__(self, num_ranks: int, modules: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> None:
        self.modules, self.import_variables = list(modules), dict(variables or {})
        self._num_ranks = num_ranks
        self._supervision: SupervisorClient | None = None
        self._monitor: DaemonMonitor | None = None  # None if this process had initialised Ray before
        self._variables: dict[str, str] = {}  # Ray's variables before the start
        self.node_id = ""
        self._nodes_of_ranks: set[str] = set()
        self.held = RayRemoteColumns()

    def __enter__(self) -> Self:
        """Raises ConfigError when Ray cannot be joined, and WorkerFailure when it does not start or dies meanwhile."""
        try:
            scratch, modules = Scratch.begin(), self.modules if self.is_own else ()
            self._supervision = SupervisorClient(scratch, modules, self.import_variables, owns_run=True)
            if not ray.is_initialized():
                self._start(self._supervision)
            self.node_id = ray.get_runtime_context().get_node_id()
        except BaseException as error:
            self._release(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(error)

    @property
    def is_lost(self) -> bool:
        """Whether Ray itself is gone, so that no call into it would return."""
        return self._monitor is not None and self._monitor.lost != ""

    @property
    def is_own(self) -> bool:
        """Whether Ray is started here, so that its only node is this machine."""
        return _address() == "local"

    @property
    def scratch(self) -> Scratch:
        """The run's scratch folder here."""
        return self.supervision.scratch

    @property
    def run_id(self) -> str:
        """The run that marks every process."""
        return self.scratch.run_id

    def describe(self, process: ProcessInfo) -> ProcessInfo:
        """Note where a process runs, and whether that is this node."""
        self.note_node(process.node_id)
        return replace(process, is_local=process.node_id == self.node_id)

    def note_node(self, node_id: str) -> None:
        """Note that a node has ranks."""
        self._nodes_of_ranks.add(node_id)

    @property
    def is_alone(self) -> bool:
        """Whether Ray has no other node than this one, and none can join: Ray was started for this process."""
        return self.is_own and len(ray.nodes()) == 1

    @property
    def supervision(self) -> SupervisorClient:
        """The client of the run's supervisor here."""
        assert self._supervision is not None, "the session was not entered"
        return self._supervision

    def _start(self, supervision: SupervisorClient) -> None:
        address = _address()
        self._variables, before = variables(), descendants()
        self._monitor = DaemonMonitor(partial(_end_ranks, supervision, before))
        os.environ[RUN_ID] = supervision.scratch.run_id
        try:
            if self.is_own:
                # One CPU per rank, however many ranks there are: ranks on CPU share the cores of this machine.
                start(self._num_ranks, supervision.scratch.ray_folder)
                daemons, server = daemon_children(), None
            else:
                daemons, server = join(address)
        finally:
            del os.environ[RUN_ID]
            supervision.watch([process.pid for process in descendants() - before])
        self._monitor.watch(daemons, server)

    def _release(self, error: BaseException | None) -> None:
        """Shut Ray down and remove its files. Raises WorkerFailure where Ray itself was lost, whatever `error` says."""
        lost = self._monitor.stop() if self._monitor is not None else ""
        if lost:  # the supervisor ends the rest of Ray, and removes its files, once this process has ended
            put_back(self._variables)
            atexit.register(_exit_without_ray)
            raise WorkerFailure(lost) from None
        is_ours, self._monitor = self._monitor is not None, None
        if self._supervision is not None:
            if is_ours:
                ray.shutdown()
            supervision, self._supervision = self._supervision, None
            supervision.end_run(error)
            put_back(self._variables)


def _end_ranks(supervision: SupervisorClient, before: Set[psutil.Process]) -> None:
    """Kill the run's processes here but for the supervisor and Ray's, which the supervisor ends after this process.

    before: the processes below this one when Ray was not yet started.
    """
    run_id = supervision.scratch.run_id
    supervision.watch([process.pid for process in descendants() - before])
    end(lambda: set(processes_with(run_id)) - family() - {psutil.Process(supervision.pid)}, patience_s=0.0)


def _address() -> str:
    return os.environ.get("RAY_ADDRESS") or "local"


def _exit_without_ray() -> None:
    """End this process before Ray's own exit handler does, which waits a minute for its server and then aborts."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(WorkerFailure.exit_code)


def start(num_cpus: int, folder: Path) -> None:
    """Start Ray with its session in `folder` and its own token.

    Raises ConfigError for an unknown version of Ray, and WorkerFailure when it does not start.
    """
    try:
        apply_patches("driver")
    except PatchError as error:
        raise ConfigError(str(error)) from None
    with _own_token():
        try:
            init(address="local", num_cpus=num_cpus, include_dashboard=False, _temp_dir=str(folder))
        except Exception as error:  # Ray raises bare ones
            raise WorkerFailure(
                f"Ray did not start on this machine: {_last_line(error)}; try: the same command again with less "
                "other work on the machine, as Ray's own time limits are short"
            ) from error


def join(address: str) -> tuple[dict[int, str], tuple[str, int] | None]:
    """Join the cluster at `address`; return the processes that the run needs: pid -> name here, and the server.

    Raises ConfigError, with the remedy, where the cluster cannot be reached, asks for another token, has another
    version, or has no node on this machine.
    """
    server = None if address == "auto" else _reachable(address)
    if server is not None:
        _require_usable(address)
    try:
        context = init(address=address)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise ConfigError(f"{_given(address)}: the cluster cannot be joined: {_last_line(error)}") from error
    raylet = owner(context.address_info["raylet_socket_name"])
    return ({raylet: "raylet"} if raylet else {}), server


def init(**options: object) -> BaseContext:
    """Call `ray.init` without its messages and without its signal handler."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    with keeping_sigterm_handler():
        return ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def variables() -> dict[str, str]:
    """Return Ray's variables in the environment of this process."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


def put_back(kept: Mapping[str, str]) -> None:
    """Restore the variables that `variables` returned; Ray sets others, RAY_AUTH_MODE among them."""
    for name in variables().keys() - kept.keys():
        del os.environ[name]
    os.environ |= kept


def _reachable(address: str) -> tuple[str, int]:
    """Return host and port of an address where something listens. Raises ConfigError where nothing does."""
    server = ray_address.parse(address)
    try:
        socket.create_connection(server, timeout=CONNECT_LIMIT_S).close()
    except OSError as error:
        raise ConfigError(
            f"{_given(address)}: nothing can be reached there ({error}); try: start the cluster (`ray start "
            "--head`), correct the address, or unset RAY_ADDRESS to run on this machine alone"
        ) from None
    return server


def _require_usable(address: str) -> None:
    """Raise ConfigError unless the cluster accepts this process, has its versions and a node on this machine."""
    client = _ask(address)
    metadata = get_cluster_metadata(client) or {}
    ours = {"ray_version": ray.__version__, "python_version": platform.python_version()}
    theirs = {name: metadata.get(name, version) for name, version in ours.items()}
    if ours != theirs:
        raise ConfigError(
            f"{_given(address)}: the cluster runs Ray {theirs['ray_version']} on Python {theirs['python_version']}, "
            f"and this is Ray {ours['ray_version']} on Python {ours['python_version']}; both must be equal; try: "
            "start the cluster from this environment"
        )
    deadline = time.monotonic() + JOIN_LIMIT_S
    while not _living_nodes(client) & find_node_ids():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{_given(address)}: this machine is no node of that cluster, and the run must be started on one; "
                f"try: `ray start --address={address}` here first"
            )
        time.sleep(0.5)


def _ask(address: str) -> GcsClient:
    """Return a client of the cluster's server, after its first reply. Raises ConfigError where none comes."""
    answers: Queue[GcsClient | Exception] = Queue()

    def ask() -> None:
        try:
            ensure_token_if_auth_enabled(create_token_if_missing=False)
            client = GcsClient(address=address)
            client.internal_kv_get(b"session_name", b"session")
            answers.put(client)
        except Exception as error:
            answers.put(error)

    # In a thread, because the library waits long where something other than a Ray server listens.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=ANSWER_LIMIT_S)
    except Empty:
        answer = TimeoutError(f"no reply within {ANSWER_LIMIT_S:g} s")
    if isinstance(answer, GcsClient):
        return answer
    if isinstance(answer, AuthenticationError):
        refused = "does not accept the one that is offered" if _offers_token() else "none is offered"
        raise ConfigError(
            f"{_given(address)}: the cluster asks for a token and {refused}; try: RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH=FILE, with the file that its nodes were started with"
        ) from None
    raise ConfigError(
        f"{_given(address)}: the process that listens there is not a Ray server ({_last_line(answer)}); try: the "
        "address that `ray start --head` has printed, port 6379 by default"
    ) from None


def _living_nodes(client: GcsClient) -> set[str]:
    nodes = client.get_all_node_info().items()
    return {node_id.hex() for node_id, node in nodes if node.state == GcsNodeInfo.GcsNodeState.ALIVE}


def _given(address: str) -> str:
    return f"RAY_ADDRESS={address}"


def _offers_token() -> bool:
    is_asked = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    return is_asked and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@contextmanager
def _own_token() -> Iterator[None]:
    """Give Ray a token unless the user has set one: Ray would write its own to the home folder, which may not exist."""
    if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = _token()
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]


@cache
def _token() -> str:
    """Make one token for this process, as Ray reads it once."""
    return secrets.token_hex(32)
