"""Several Ray nodes on this machine: each a raylet with an address, ports, token and folder that no other test has."""

from __future__ import annotations

import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
from command_line import is_rank
from forked_run import LIMIT, without_ray

from megatron_rl.cluster.stale_processes import end, processes_with

NODE = "MEGATRON_RL_TEST_NODE"
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0"}
"""As scripts/run_70b_ppo.sh starts nodes."""

PORTS = range(5_000, 10_000)
"""Linux, Ray and the product choose their own ports above these."""
CLAIMS: list[socket.socket] = []
"""One socket for each port that was given out. Its name is taken on this machine until this process ends."""


def free_port() -> int:
    """Return a port of `PORTS` on which nothing listens. No other test gets it while this process runs."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):  # `random` has one seed in all workers
        claim = socket.socket(socket.AF_UNIX)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            claim.bind(f"\0megatron_rl_test_port_{port}")
            CLAIMS.append(claim)
            return port
        claim.close()
    raise OSError(f"no port of 127.0.0.1 from {PORTS.start} to {PORTS.stop - 1} is free")


class Raylets:
    """A cluster of Ray nodes with so many CPUs each; every process that a node starts carries its tag.

    variables: what a driver that joins needs in its environment, before it imports Ray. Use it as a context manager.
    """

    def __init__(self, *num_cpus: int) -> None:
        self._num_cpus = num_cpus
        # Short: the names of Ray's sockets are limited to 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="nodes_", dir="/tmp"))
        self._port = free_port()
        self.variables = {
            "RAY_ADDRESS": f"127.0.0.1:{self._port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
        }
        self._nodes: list[str] = []

    def __enter__(self) -> Raylets:
        try:
            for num_cpus in self._num_cpus:
                self.add_node(num_cpus)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def add_node(self, num_cpus: int, variables: Mapping[str, str] | None = None) -> None:
        """Start one more node; the first is the head, and a driver's own node. variables: of its environment alone."""
        where = ["--address", self.variables["RAY_ADDRESS"]]
        if not self._nodes:
            where = [
                "--head",
                f"--port={self._port}",
                "--include-dashboard=false",
                "--no-monitor",
                f"--temp-dir={self._folder}",
            ]
        ports = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port", "node-manager-port")
        where += [f"--{name}={free_port()}" for name in ports]
        address = self.address(len(self._nodes))
        tag = secrets.token_hex(8)
        environment = without_ray() | dict(variables or {})
        self._nodes.append(tag)
        self._run_ray(["start", f"--node-ip-address={address}", f"--num-cpus={num_cpus}", *where], environment, tag)

    @staticmethod
    def address(node: int) -> str:
        """By which Ray and ranks know a node."""
        return f"127.0.0.{node + 1}"

    def _run_ray(self, arguments: list[str], environment: dict[str, str], tag: str) -> None:
        output = self._folder / f"start_{len(self._nodes)}.txt"
        done = subprocess.run(
            [str(Path(sys.executable).parent / "ray"), *arguments],
            env=environment | self.variables | {NODE: tag} | SETTINGS,
            stdin=subprocess.DEVNULL,
            stdout=output.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, output.read_text()

    def family(self, node: int) -> list[psutil.Process]:
        """Every living process of a node: raylet, agents, ranks, and what these started."""
        return processes_with(self._nodes[node], NODE)

    def ranks(self, node: int) -> dict[int, psutil.Process]:
        """Rank -> its process, on one node."""
        found = {}
        for process in self.family(node):
            with suppress(psutil.Error):  # it has just ended
                if is_rank(process):
                    found[int(process.name().split()[1])] = process
        return found

    def left_over(self, patience: float = 60) -> dict[int, psutil.Process]:
        """Ranks that outlive their run by more than `patience` seconds, on any node."""
        deadline = time.monotonic() + patience
        while True:
            found = {}
            for node in range(len(self._nodes)):
                found |= self.ranks(node)
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def kill(self, node: int) -> None:
        """End a node as a power cut would: every process of it at once, as none that is stopped sees another's end."""

        def stopped() -> list[psutil.Process]:
            family = self.family(node)
            for process in family:
                with suppress(psutil.Error):
                    process.suspend()
            return family

        assert end(stopped) == []

    def stop(self) -> None:
        """Kill all nodes and remove their folder."""
        for node in range(len(self._nodes)):
            self.kill(node)
        self._nodes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
