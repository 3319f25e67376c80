"""GPUs of ranks on this machine, by the names in CUDA_VISIBLE_DEVICES: no GPU is touched."""

from __future__ import annotations

import pytest

from megatron_rl.cluster.launcher import VISIBLE_GPUS
from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import ConfigError, WorkerFailure

ALL = "3 GPUs of this machine are left"


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VISIBLE_GPUS, "7,5,3")
    with LocalLauncher("cuda") as launcher:
        yield launcher


def test_gpus_come_back_after_a_failure(launcher: LocalLauncher) -> None:
    """As a repair needs them, which keeps the launcher. Would not catch a process that still holds its GPU."""
    with pytest.raises(WorkerFailure), launcher.reserve(PoolSize(1, 2)), launcher.reserve(PoolSize(1, 1)):
        with pytest.raises(ConfigError, match="0 GPUs of this machine are left"):
            launcher.ask(PoolSize(1, 1))
        raise WorkerFailure("a rank was lost")
    with pytest.raises(ConfigError, match=ALL):
        launcher.ask(PoolSize(1, 4))


def test_a_replica_that_leaves_gives_its_gpu_back_and_may_ask_again(launcher: LocalLauncher) -> None:
    """Of two replicas of one GPU each. Would not catch which GPU a rank sees."""
    first, second = (launcher.ask(PoolSize(1, 1)) for _ in range(2))
    first.give_back()
    assert not first.is_given and second.is_given
    first.ask()
    assert first.is_given
    for ranks in (first, second):
        ranks.give_back()
    with pytest.raises(ConfigError, match=ALL):
        launcher.ask(PoolSize(1, 4))
