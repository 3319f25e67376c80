"""Ray, started on this machine for one run, or joined where it runs; what is wrong with a cluster, in one sentence."""

from __future__ import annotations

import functools
import logging
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue

import ray
from ray._common.usage.usage_lib import get_cluster_metadata
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.services import find_node_ids
from ray._private.worker import BaseContext
from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]  # its stub lacks both
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import AuthenticationError, RayError

from megatron_rl.cluster import ray_address
from megatron_rl.cluster.daemons import owner
from megatron_rl.cluster.signals import keeping_sigterm_handler
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import ConfigError
from third_party_patches import PatchError, apply_patches

CONNECT_LIMIT_S = 5.0
ANSWER_LIMIT_S = 15.0
JOIN_LIMIT_S = 5.0
"""Nodes may still be joining when a run starts."""

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",  # a run does not use them, and their port asks for no token
    "RAY_worker_niceness": "0",  # ranks are what the machine is for
    "RAY_enable_worker_prestart": "0",  # ranks have environments of their own, for which no worker waits
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about this setting
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # answers of a failed call that nobody reads
}


def start(num_cpus: int, folder: Path) -> None:
    """Start Ray with its session in `folder` and a token of its own. Raises ConfigError for a version not known."""
    try:
        apply_patches("driver")
    except PatchError as error:
        raise ConfigError(str(error)) from None
    with _own_token():
        init(address="local", num_cpus=num_cpus, include_dashboard=False, _temp_dir=str(folder))


def join(address: str) -> tuple[dict[int, str], tuple[str, int] | None]:
    """Join the cluster at `address`; what of it a run cannot do without: pid -> name here, and its server.

    Raises ConfigError with what to do where the cluster cannot be reached, asks for another token, has another version,
    or has no node on this machine.
    """
    server = None if address == "auto" else _reachable(address)
    if server is not None:
        _require_ours(address)
    try:
        context = init(address=address)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise ConfigError(f"{_given(address)}: the cluster cannot be joined: {_last_line(error)}") from error
    raylet = owner(context.address_info["raylet_socket_name"])
    return ({raylet: "raylet"} if raylet else {}), server


def init(**options: object) -> BaseContext:
    """`ray.init`, without its words and without its signal handler."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    with keeping_sigterm_handler():
        return ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def variables() -> dict[str, str]:
    """Ray's variables in the environment of this process."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


def put_back(kept: Mapping[str, str]) -> None:
    """Restore the variables that `variables` returned: Ray sets some of its own, RAY_AUTH_MODE among them."""
    for name in variables().keys() - kept.keys():
        del os.environ[name]
    os.environ |= kept


def _reachable(address: str) -> tuple[str, int]:
    """Host and port of an address behind which something listens; ConfigError otherwise."""
    server = ray_address.parse(address)
    try:
        socket.create_connection(server, timeout=CONNECT_LIMIT_S).close()
    except OSError as error:
        raise ConfigError(
            f"{_given(address)}: nothing can be reached there ({error}); nearest: start the cluster (`ray start "
            "--head`), correct the address, or unset RAY_ADDRESS to run on this machine alone"
        ) from None
    return server


def _require_ours(address: str) -> None:
    """Raise ConfigError unless the cluster lets us in, is of our version and has a node on this machine."""
    client = _ask(address)
    metadata = get_cluster_metadata(client) or {}
    ours = {"ray_version": ray.__version__, "python_version": platform.python_version()}
    theirs = {name: metadata.get(name, version) for name, version in ours.items()}
    if ours != theirs:
        raise ConfigError(
            f"{_given(address)}: the cluster runs Ray {theirs['ray_version']} on Python {theirs['python_version']}, "
            f"and this is Ray {ours['ray_version']} on Python {ours['python_version']}; both must be equal; nearest: "
            "start the cluster from this environment"
        )
    deadline = time.monotonic() + JOIN_LIMIT_S
    while not _living_nodes(client) & find_node_ids():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{_given(address)}: this machine is no node of that cluster, and the run must be started on one; "
                f"nearest: `ray start --address={address}` here first"
            )
        time.sleep(0.5)


def _ask(address: str) -> GcsClient:
    """A client of the cluster's server, which has answered. Raises ConfigError where it does not, or not to us."""
    answers: Queue[GcsClient | Exception] = Queue()

    def ask() -> None:
        try:
            ensure_token_if_auth_enabled(create_token_if_missing=False)
            client = GcsClient(address=address)
            client.internal_kv_get(b"session_name", b"session")
            answers.put(client)
        except Exception as error:
            answers.put(error)

    # In a thread, as the library waits longer than a user does for what is no Ray server.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=ANSWER_LIMIT_S)
    except Empty:
        answer = TimeoutError(f"no answer within {ANSWER_LIMIT_S:g} s")
    if isinstance(answer, GcsClient):
        return answer
    if isinstance(answer, AuthenticationError):
        refused = "does not accept the one that is offered" if _offers_token() else "none is offered"
        raise ConfigError(
            f"{_given(address)}: the cluster asks for a token and {refused}; nearest: RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH=FILE, with the file that its nodes were started with"
        ) from None
    raise ConfigError(
        f"{_given(address)}: what listens there does not answer as a Ray server ({_last_line(answer)}); nearest: the "
        "address that `ray start --head` has printed, port 6379 unless told otherwise"
    ) from None


def _living_nodes(client: GcsClient) -> set[str]:
    nodes = client.get_all_node_info().items()
    return {node_id.hex() for node_id, node in nodes if node.state == GcsNodeInfo.GcsNodeState.ALIVE}


def asked(size: PoolSize) -> str:
    """A pool's ranks as a message names them."""
    return f"{size.nodes_key}={size.num_nodes} node(s) with {size.ranks_key}={size.num_ranks_per_node}"


def shortage(nodes: Iterable[Mapping[str, float]], pools: Sequence[PoolSize], rank: Mapping[str, float]) -> str:
    """What living nodes lack for all pools at once; empty when they have room.

    nodes: resource -> what each has in all. rank: resource -> what one rank needs. Larger groups are placed first,
    each on the fullest node that still has room.
    """
    nodes = list(nodes)
    room = [min(int(node.get(kind, 0) // count) for kind, count in rank.items()) for node in nodes]
    placed = [0] * len(pools)
    for number, pool in sorted(enumerate(pools), key=lambda pair: -pair[1].num_ranks_per_node):
        for _ in range(pool.num_nodes):
            fitting = [node for node, free in enumerate(room) if free >= pool.num_ranks_per_node]
            if not fitting:
                break
            room[min(fitting, key=lambda node: room[node])] -= pool.num_ranks_per_node
            placed[number] += 1
    lacking = [number for number, pool in enumerate(pools) if placed[number] < pool.num_nodes]
    if not lacking:
        return ""
    have = "; ".join(listing(node) for node in nodes) or "none"
    places, pool = placed[lacking[0]], pools[lacking[0]]
    others = [asked(other) for number, other in enumerate(pools) if number != lacking[0]]
    beside = f" beside {', '.join(others)}" if others else ""
    nearest = f"{pool.nodes_key}={places}" if places else f"a smaller {pool.ranks_key}"
    return (
        f"the cluster cannot give {asked(pool)} x [{listing(rank)}] each{beside}: "
        f"its {len(nodes)} node(s) have [{have}], which is room for {places}; "
        f"nearest: {nearest}, or more nodes (`ray start --address=...` on each)"
    )


def listing(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs, in words."""
    return ", ".join(f"{kind} {resources.get(kind, 0):g}" for kind in ("CPU", "GPU"))


def _given(address: str) -> str:
    return f"RAY_ADDRESS={address}"


def _offers_token() -> bool:
    is_asked = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    return is_asked and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@contextmanager
def _own_token() -> Iterator[None]:
    """Offer Ray a token unless the user names one: it would write its own to the home folder, which may not exist."""
    if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = _token()
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]


@functools.cache
def _token() -> str:
    """The same for the whole life of this process, as Ray reads it once."""
    return secrets.token_hex(32)
