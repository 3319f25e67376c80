"""Let megatron-core write checkpoint files from threads of the rank's own process.

Reason: its writer starts a permanent manager process for the results of writes. Ranks that are daemons cannot start
it, and it outlives a rank that is killed. Before 0.19 the writer also forks two processes for every save. The fork of a
process with communication threads can hang in a lock that one of them held. From 0.19 on it writes from threads, and
reports that a write has failed, but not why.
What it does: a thread runs Megatron's own function for each file; results, errors too, return through an ordinary
queue. Files, names and content do not change.
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
    """Replace the writer and its queue in `filesystem_async`, under the names of the installed version."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync
    forks = hasattr(writer, "write_preloaded_data_multiproc")
    name = "write_preloaded_data_multiproc" if forks else "write_preloaded_data_multithread"
    setattr(writer, name, staticmethod(write_from_threads))
    setattr(filesystem_async, "_get_write_results_queue" if forks else "get_write_results_queue", queue.SimpleQueue)


PATCH = Patch(MEGATRON, apply, drop_when="FileSystemWriterAsync can write without starting processes")
