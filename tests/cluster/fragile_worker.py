"""A worker that fails in every way a worker can. It imports torch only where needed, so that it starts quickly."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from datetime import timedelta

from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.errors import ConfigError

LOST_PEER = "[gloo] Connection closed by peer [10.0.0.1]:4711"


class FragileWorker:
    """Every rank is its own data-parallel rank. imports_torch: now, where no method waits for it."""

    def __init__(self, unlucky_rank: int = -1, imports_torch: bool = False) -> None:
        self.rank = int(os.environ["RANK"])
        if imports_torch:
            import torch.distributed  # noqa: F401
        if self.rank == unlucky_rank:
            raise ConfigError("tp(3) does not divide num_heads(8)")

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        size = int(os.environ["WORLD_SIZE"])
        return Coordinates(self.rank, self.rank, size, True, self.rank, size, True)

    @remote_method(Dispatch.ONE_TO_ALL)
    def nap(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    @remote_method(Dispatch.ONE_TO_ALL)
    def divide_by_zero_on(self, unlucky_rank: int) -> float:
        """Fails on one rank; the others lose their peer a moment earlier, as a skewed clock would show it."""
        if self.rank == unlucky_rank:
            time.sleep(0.3)
            return 1 / 0
        raise RuntimeError(LOST_PEER)

    @remote_method(Dispatch.ONE_TO_ALL)
    def gpu_of(self, unlucky_rank: int, report: str) -> str:
        """The GPU that the rank sees; on one rank CUDA reports an error, as torch raises it, and peers lose it."""
        if unlucky_rank < 0:
            return os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if self.rank == unlucky_rank:
            raise RuntimeError(f"CUDA error: {report}\nCUDA kernel errors might be asynchronously reported")
        raise RuntimeError(LOST_PEER)

    @remote_method(Dispatch.ONE_TO_ALL)
    def lose(self, unlucky_rank: int, seconds: float) -> None:
        """One rank is killed after so many seconds; all others report at once that they have lost a peer."""
        if self.rank == unlucky_rank:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(LOST_PEER)

    @remote_method(Dispatch.RANK_ZERO)
    def answer_with_lock(self) -> object:
        """An answer that cannot be pickled."""
        return threading.Lock()

    @remote_method(Dispatch.ONE_TO_ALL)
    def barrier_all_but(self, absent_rank: int) -> None:
        """Everybody enters a gloo barrier except one, who never comes."""
        import torch.distributed

        from megatron_rl.roles.environment import RankEnvironment
        from megatron_rl.roles.rendezvous import open_store

        place = RankEnvironment.read()
        store = open_store(place, timedelta(seconds=60))
        torch.distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
        if self.rank == absent_rank:
            time.sleep(600)
        torch.distributed.barrier()

    @remote_method(Dispatch.ONE_TO_ALL)
    def start_child(self) -> int:
        """A child process of the worker, as a checkpoint writer would be; its pid."""
        return subprocess.Popen(["sleep", "600"]).pid


class FailsToUnpickle:
    """A constructor argument whose module cannot be imported on the ranks."""

    def __reduce__(self) -> tuple:
        return _import_missing_module, ()


def _import_missing_module() -> None:
    raise ImportError("no module named 'missing_on_the_worker'")
