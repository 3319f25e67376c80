"""Processes of several pools: what they say to each other, and each as a rank of a world."""

from __future__ import annotations

import os
from datetime import timedelta

from ranks import common_store

TIMEOUT_S = 60


class Messages:
    """Messages between the processes: a name, and a text."""

    def __init__(self) -> None:
        self.store = common_store(timedelta(seconds=TIMEOUT_S))

    def say(self, what: str, value: str = "") -> None:
        self.store.set(what, value)

    def wait(self, *what: str) -> list[str]:
        return [self.store.get(one).decode() for one in what]


def host_of(config, pool: str, rank: int, world_size: int, world: str):
    """This process as a rank of a world, which has a name, in a pool."""
    from megatron_rl.roles.host import RankHost

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ["MASTER_STORE"] += f"_{world}"
    return RankHost(config, timedelta(seconds=TIMEOUT_S), pool=pool)
