"""Where the ranks of a world meet, and what a stranger on the same machine or network can do there."""

from __future__ import annotations

import socket
import stat
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import common_store, run_ranks

from megatron_rl.roles.environment import RankEnvironment
from megatron_rl.roles.rendezvous import listen, open_store
from megatron_rl.roles.transfer_address import TransferCalls, TransferStore

pytestmark = pytest.mark.dist

TIMEOUT = timedelta(seconds=30)


def own_listeners() -> list[int]:
    """Ports that this process listens on."""
    return [one.laddr.port for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]


def summed(group: dist.ProcessGroup | None = None) -> float:
    """The sum of 1, 2, ... over the ranks of a group."""
    value = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(value, group=group)
    return value.item()


def meet() -> dict:
    """Open the world's store, look at it, and make a world and a further group of it."""
    place = RankEnvironment.read()
    store = open_store(place, TIMEOUT)
    found = {"kind": type(store).__name__, "before": own_listeners(), "timeout": store.timeout}
    if place.rank == 0:
        store.set("said", "by rank 0")
    found["heard"] = store.get("said").decode()
    found["mode"] = stat.S_IMODE(Path(place.master_store).stat().st_mode)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=TIMEOUT)
    found["sums"] = (summed(), summed(dist.new_group([0, 1, 2])))
    return found


def test_ranks_of_one_machine_meet_in_a_file() -> None:
    """Sums of 1, 2 and 3 by hand. Before gloo connects, no rank listens anywhere: without the store's server there is
    nothing to reach. Would not catch NCCL, which needs GPUs.
    """
    for found in run_ranks(3, meet):
        assert found["kind"] == "FileStore" and found["before"] == []
        assert found["heard"] == "by rank 0" and found["timeout"] == TIMEOUT
        assert found["sums"] == (6.0, 6.0)


def met_by_strangers() -> list[float]:
    """Every rank's listeners get strangers who say something, or nothing, and stay; then the groups are used."""
    place = RankEnvironment.read()
    store = open_store(place, TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=TIMEOUT)
    sums = [summed()]
    ports, strangers = own_listeners(), []
    for port in ports:
        for said in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(8), (1).to_bytes(8, "little"), bytes(4096), b"\xff" * 4096):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            with suppress(OSError):  # sent away meanwhile
                strangers[-1].sendall(said)
    sums += [summed(), summed(dist.new_group([0, 1]))]
    assert ports and len(strangers) == 6 * len(ports)
    return sums


def test_strangers_at_the_ports_of_gloo_change_nothing() -> None:
    """They are let in and are nobody: sums of 1 and 2 in the open group and in a new one. Would not catch a stranger
    who speaks gloo's protocol, and is there before a rank.
    """
    assert run_ranks(2, met_by_strangers) == [[3.0, 3.0, 3.0]] * 2


def asked_by_a_stranger() -> str:
    """Rank 0 serves the store as on several nodes; the other process is no rank and has nothing but the port."""
    place, common = replace(RankEnvironment.read(), master_store=None), common_store(TIMEOUT)
    if place.rank == 0:
        listener = listen(place.master_addr, 0, 2)
        port = listener.getsockname()[1]
        common.set("port", str(port))
        store = open_store(replace(place, master_port=port, master_listen_fd=listener.detach()), TIMEOUT)
        store.set("secret", "of the ranks")
        return store.get("written by").decode()
    store = dist.TCPStore(place.master_addr, int(common.get("port")), 2, is_master=False, timeout=TIMEOUT)
    secret = store.get("secret").decode()
    store.set("written by", "a stranger")
    return secret


def test_the_store_of_several_nodes_is_open_to_their_network() -> None:
    """As docs/scale/security.md says: whoever reaches its port reads and writes. Would not catch a way to close it."""
    assert run_ranks(2, asked_by_a_stranger) == ["a stranger", "of the ranks"]


def rank_at(address: str):
    """What a transfer's store asks of rank 0 of an actor's pool of one, whose node has this address."""
    place = replace(RankEnvironment.read(), node_address=address)
    return SimpleNamespace(
        environment=place, groups=SimpleNamespace(grid=SimpleNamespace(world_size=1)), timeout=TIMEOUT
    )


def transfers_met() -> list:
    """The calls that are heard over a transfer's store, where it is, and what listens for it: on one machine, and as on
    several nodes.
    """
    found = []
    known = [entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == socket.AF_INET]
    others = [entry.address for entry in known if not entry.address.startswith("127.")]
    for address in ("127.0.0.1", *others[:1]):
        rank = rank_at(address)
        store = TransferStore(rank, num_receivers=2)
        calls = TransferCalls(store.address, rank)
        store.call({0: 7, 1: 8})
        heard = calls.next()
        store.close()
        found.append((heard, calls.next(), store.address.file is not None, len(own_listeners())))
    return found


def test_transfers_of_one_machine_are_files_too() -> None:
    """Two replicas' versions by hand, then the end of the calls; at a network's address rank 0 listens. Would not catch
    the second half on a machine without a network.
    """
    [(first, *second)] = run_ranks(1, transfers_met)
    assert first == ({0: 7, 1: 8}, None, True, 0)
    assert second in ([], [({0: 7, 1: 8}, None, False, 1)])
