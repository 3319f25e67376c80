"""Rendezvous of a pool's ranks: a key-value store that rank 0 serves on its own address only."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from megatron_rl.roles.environment import RankEnvironment


def open_store(environment: RankEnvironment, timeout: timedelta) -> dist.Store:
    """The pool's store; every rank must call, and rank 0 serves it. A rank that is alone needs no server.

    Left to itself, torch serves it on all interfaces, and it asks nobody for a password.
    timeout: how long a rank waits for the server, and for a key.
    """
    host, port = environment.master_addr, environment.master_port
    listener_fd = environment.master_listen_fd
    if environment.world_size == 1 and listener_fd is None:
        return dist.HashStore()
    if environment.rank == 0 and listener_fd is None:
        listener_fd = listen(host, port, environment.world_size).detach()
    return tcp_store(host, port, environment.world_size, timeout, listener_fd if environment.rank == 0 else None)


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
