"""A cluster that cannot be joined, or is too small: one sentence with what to do, code 2, within seconds."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from forked_run import without_ray
from raylets import Raylets, free_port

from megatron_rl.cluster import ray_session
from megatron_rl.cluster.ray_launcher import asked, shortage
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import ConfigError

TRAINER = ("trainer.nnodes", "trainer.n_gpus_per_node")
GPU_NODE, GPU_RANK = {"CPU": 96.0, "GPU": 8.0, "memory": 1e12}, {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("nodes", "num_nodes", "num_ranks", "rank", "room"),
    [
        ([GPU_NODE] * 2, 2, 8, GPU_RANK, None),
        ([GPU_NODE] * 2, 4, 4, GPU_RANK, None),
        ([GPU_NODE] * 2, 3, 8, GPU_RANK, 2),
        ([GPU_NODE], 1, 16, GPU_RANK, 0),
        ([{"CPU": 4.0}], 1, 1, GPU_RANK, 0),
        ([{"CPU": 4.0}, {"CPU": 1.0}], 3, 2, {"CPU": 1}, 2),
        ([], 1, 1, {"CPU": 1}, 0),
    ],
)
def test_what_a_cluster_lacks(nodes: list, num_nodes: int, num_ranks: int, rank: dict, room: int | None) -> None:
    """Would not catch CPUs that others occupy; those are waited for."""
    text = shortage(nodes, [PoolSize(num_nodes, num_ranks, *TRAINER)], rank)
    if room is None:
        assert text == ""
    else:
        assert f"trainer.nnodes={num_nodes} node(s) with trainer.n_gpus_per_node={num_ranks} x [CPU 1, GPU" in text
        assert f"which is room for {room};" in text


def test_what_a_cluster_lacks_for_several_pools() -> None:
    """Two nodes of 8: 8 + 4 + 4 fit, 8 + 4 + 5 do not, though each would alone. By hand; would not catch a placement
    that only a cleverer packing finds.
    """
    train, critic = PoolSize(1, 8, *TRAINER), PoolSize(1, 4, "pools.critic.nnodes", "pools.critic.n_gpus_per_node")
    keys = ("actor_rollout_ref.rollout.nnodes", "actor_rollout_ref.rollout.n_gpus_per_node")
    assert shortage([GPU_NODE] * 2, [train, critic, PoolSize(1, 4, *keys)], GPU_RANK) == ""
    assert shortage([GPU_NODE] * 2, [PoolSize(1, 5, *keys)], GPU_RANK) == ""
    text = shortage([GPU_NODE] * 2, [train, critic, PoolSize(1, 5, *keys)], GPU_RANK)
    assert "cannot give pools.critic.nnodes=1 node(s) with pools.critic.n_gpus_per_node=4 x [CPU 1, GPU 1]" in text
    assert f"in addition to {asked(train)}, {asked(PoolSize(1, 5, *keys))}" in text
    assert "a smaller pools.critic.n_gpus_per_node" in text


def test_what_is_no_address() -> None:
    """Before anything is asked for it: see test_ray_address.py. Would not catch a name that only Ray knows."""
    with pytest.raises(ConfigError, match=r"node0\.\.cluster:6379 is no HOST:PORT of a Ray cluster: .*try: "):
        ray_session.join("node0..cluster:6379")


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_nothing_listens_there(host: str) -> None:
    """Would not catch a firewall that drops packets: that takes CONNECT_LIMIT_S."""
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="nothing can be reached there .*try: start the cluster"):
        ray_session.join(f"{host}:{free_port()}")
    assert time.monotonic() - begun < 15


@pytest.mark.timeout(60)
def test_something_else_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts and says nothing. Would not catch a Ray server that is slower than the limit."""
    monkeypatch.setattr(ray_session, "ANSWER_LIMIT_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ConfigError, match="is not a Ray server .*port 6379 by default"):
            ray_session.join(address)


JOIN = """
import sys
from megatron_rl.cluster.ray_launcher import RayLauncher
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import MegatronRLError
try:
    with RayLauncher(1, "cpu") as launcher, launcher.reserve(PoolSize(int(sys.argv[1]), 1)):
        print("joined")
except MegatronRLError as error:
    print(error)
    sys.exit(error.exit_code)
"""
ALTER = """
import json, sys
from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
from ray._common.usage.usage_lib import get_cluster_metadata
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
altered = get_cluster_metadata(client) | {"ray_version": "2.59.0"}
client.internal_kv_put(CLUSTER_METADATA_KEY, json.dumps(altered).encode(), True, b"cluster")
"""


def drive(variables: Mapping[str, str], program: str, *arguments: str) -> tuple[int, str, float]:
    """Exit code, stdout and seconds of a program with only these of Ray's variables, and no home folder."""
    clean = without_ray()
    env = clean | {"HOME": "/proc/none", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True, timeout=100
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.strip(), time.monotonic() - begun


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_real_cluster_refuses_and_admits() -> None:
    """Without its token, with another one, too small, as it should be, and of another version, by what it has stored.

    Would not catch a version whose messages this one cannot read.
    """
    with Raylets(2) as raylets:
        refuse_and_admit(raylets.variables)


def refuse_and_admit(cluster: dict[str, str]) -> None:
    address = {"RAY_ADDRESS": cluster["RAY_ADDRESS"]}
    wrong = cluster | {"RAY_AUTH_TOKEN": secrets.token_hex(16)}
    cases = [(address, "1"), (address | {"RAY_AUTH_MODE": "token"}, "1"), (wrong, "1"), (cluster, "3"), (cluster, "1")]
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda case: drive(case[0], JOIN, case[1]), cases))
    assert [code for code, *_ in done] == [2, 2, 2, 2, 0], done
    none, none_found, refused, small, joined = (text for _, text, _ in done)
    for text in (none, none_found):
        assert "the cluster asks for a token and none is offered; try: RAY_AUTH_MODE=token and" in text
    assert "does not accept the one that is offered" in refused
    wanted = "trainer.nnodes=3 node(s) with trainer.n_gpus_per_node=1 x [CPU 1, GPU 0] each"
    assert small.startswith(f"the cluster cannot give {wanted}: its ")
    assert "which is room for 2; try: trainer.nnodes=2" in small
    assert joined == "joined"
    assert all(len(text.splitlines()) == 1 for _, text, _ in done)
    assert drive(cluster, ALTER, cluster["RAY_ADDRESS"])[0] == 0
    code, text, _ = drive(cluster, JOIN, "1")
    assert code == 2 and "the cluster runs Ray 2.59.0 on Python 3." in text and "both must be equal" in text
