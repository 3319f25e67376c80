"""Let megatron-core write checkpoint files from threads of the rank's own process.

Reason: its writer forks two processes for every save and starts a permanent manager process for their answers. The fork
of a process with communication threads can hang in a lock that one of them held. Ranks that are daemons cannot start
the manager, and the manager outlives a rank that is killed.
What it does: a thread runs, for each file, the function that a forked process would run; answers return through an
ordinary queue. Files, names and content do not change.
"""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from third_party_patches.guard import MEGATRON, Patch


def write_from_threads(
    transforms: list[Any], use_msc: bool, rank: int, write_buckets: list[Any], results: queue.SimpleQueue[Any]
) -> None:
    """Write every bucket to its file; puts {number: write results} into `results`, or the first exception."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting: queue.Queue[Any] = queue.Queue()
    with ThreadPoolExecutor(len(write_buckets)) as threads:
        for number, bucket in enumerate(write_buckets):
            waiting.put(number)
            threads.submit(
                FileSystemWriterAsync.write_preloaded_data,
                transforms,
                number,
                bucket,
                answers,
                waiting,
                use_fsync=True,
                use_msc=use_msc,
            )
    written = dict(answers.get() for _ in write_buckets)
    failures = [answer for answer in written.values() if isinstance(answer, Exception)]
    results.put(failures[0] if failures else written)


def apply() -> None:
    """Replace the forking writer and its queue in `filesystem_async`."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._get_write_results_queue = queue.SimpleQueue
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write_from_threads)


PATCH = Patch(
    MEGATRON, apply, drop_when="FileSystemWriterAsync can write without starting processes", not_needed=">=0.19"
)
