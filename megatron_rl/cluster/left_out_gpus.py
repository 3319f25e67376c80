"""GPUs of Ray's nodes that no rank is to have. Ray chooses a node's GPUs itself, so an actor holds each of these."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_rl.cluster.launcher import VISIBLE_GPUS

PLACE_LIMIT_S = 20.0
"""Seconds for Ray to give a GPU that an earlier rank had."""


class GpuHolder:
    """An actor that has a GPU and does nothing with it."""

    def gpu(self) -> str:
        """Return the GPU that Ray has given it, in the form of VISIBLE_GPUS."""
        return os.environ.get(VISIBLE_GPUS, "")


class LeftOutGpus:
    """The GPUs that are held. variables: of the holders' environment."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        self._holders: dict[tuple[str, str], ActorHandle] = {}

    def hold(self, node: str, gpu: str) -> bool:
        """Hold a GPU of a node, whose ranks must have ended; return whether Ray gave it.

        Takes free GPUs of the node until Ray gives this one, and gives the others back.
        """
        if (node, gpu) in self._holders:
            return True
        options: dict[str, Any] = {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            "num_cpus": 0,
            "num_gpus": 1,
            "runtime_env": {"env_vars": self._variables},
        }
        taken = list[ActorHandle]()
        with suppress(RayError, GetTimeoutError):  # the node is gone, or another run has its GPUs
            while (node, gpu) not in self._holders:
                taken.append(ray.remote(GpuHolder).options(**options).remote())
                if ray.get(taken[-1].gpu.remote(), timeout=PLACE_LIMIT_S) == gpu:
                    self._holders[node, gpu] = taken.pop()
        for actor in taken:
            ray.kill(actor)
        return (node, gpu) in self._holders

    def give_back(self) -> None:
        """Let ranks have them again."""
        for actor in self._holders.values():
            ray.kill(actor)
        self._holders.clear()

    def without(self, nodes: list[dict[str, Any]]) -> list[dict[str, float]]:
        """Return the resources of `living_nodes` that ranks can have."""
        held = Counter(node for node, _ in self._holders)
        found = []
        for node in nodes:
            resources = dict(node["Resources"])
            if held[node["NodeID"]]:
                resources["GPU"] = resources.get("GPU", 0.0) - held[node["NodeID"]]
            found.append(resources)
        return found
