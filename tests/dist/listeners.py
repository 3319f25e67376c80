"""Sockets that processes listen on, and whom they let in."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress

import psutil


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, str, int]]:
    """(name of the process, address, port) of every TCP socket that these processes and all they started listen on;
    of a rank the class, without the method that it is in.

    By descent, too: a process that gives itself a title hides the environment by which it would be found.
    """
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    name, sockets = member.name().partition(".")[0], member.net_connections("tcp")
                    found |= {(name, *one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


def open_to_others(listeners: Iterable[tuple[str, str, int]]) -> set[tuple[str, str, int]]:
    """Those of `listening` that another machine could reach."""
    return {one for one in listeners if not is_loopback(one[1])}


def is_loopback(address: str) -> bool:
    host = ipaddress.ip_address(address)
    return (getattr(host, "ipv4_mapped", None) or host).is_loopback
