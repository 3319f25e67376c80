"""Rendezvous of a world's ranks: a key-value store, which is a file where all are on one machine.

The file is in the run's folder, of mode 0700. Ranks of several nodes meet at a store that rank 0 serves on its own
address only; torch's server has no password.
"""

from __future__ import annotations

import os
import socket
import tempfile
from datetime import timedelta

import torch.distributed as dist

from megatron_rl.roles.environment import RankEnvironment


def open_store(environment: RankEnvironment, timeout: timedelta) -> dist.Store:
    """The pool's store; every rank must call. A rank that is alone needs none but its own memory.

    timeout: how long a rank waits for the server, and for a key.
    """
    host, port = environment.master_addr, environment.master_port
    listener_fd = environment.master_listen_fd
    if environment.world_size == 1 and listener_fd is None:
        return dist.HashStore()
    if environment.master_store is not None:
        return file_store(environment.master_store, environment.world_size, timeout)
    if environment.rank == 0 and listener_fd is None:
        listener_fd = listen(host, port, environment.world_size).detach()
    return tcp_store(host, port, environment.world_size, timeout, listener_fd if environment.rank == 0 else None)


def new_store_file() -> str:
    """Make an empty file for a store, in this rank's temporary folder, which is its run's; only this user reads it."""
    descriptor, file = tempfile.mkstemp(prefix="store_")
    os.close(descriptor)
    return file


def file_store(file: str, num_ranks: int, timeout: timedelta) -> dist.FileStore:
    """One rank's end of a store in a file. The last of `num_ranks` that lets go of it removes the file."""
    store = dist.FileStore(file, num_ranks)
    store.set_timeout(timeout)
    return store


def listen(host: str, port: int, num_ranks: int) -> socket.socket:
    """A socket that listens on `host` alone; port 0: any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=num_ranks)


def tcp_store(
    host: str, port: int, num_ranks: int, timeout: timedelta, listener_fd: int | None = None, wait: bool = True
) -> dist.TCPStore:
    """One rank's end of a store for `num_ranks`; the rank that has a listening socket, which it hands over, serves it.

    wait: the server returns only when all ranks have come.
    """
    return dist.TCPStore(
        host,
        port,
        num_ranks,
        is_master=listener_fd is not None,
        wait_for_workers=wait,
        timeout=timeout,
        master_listen_fd=listener_fd,  # the store closes it
        use_libuv=True,  # the other server takes no socket from its caller
    )
