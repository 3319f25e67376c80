"""Connect the actor's pool and the rollout's pools, which are different worlds, through a key-value store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch.distributed import DistError

from megatron_rl.device import Device
from megatron_rl.observe.liveness import made_progress
from megatron_rl.roles.environment import lost_peers_survived
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.rendezvous import file_store, listen, new_store_file, tcp_store

if TYPE_CHECKING:
    from megatron_rl.hybrid_engine.transport import Transport


Result = TypeVar("Result")
NO_MORE_CALLS = "null"
MEET_S = 30.0
"""Seconds to wait for ranks at a weight transfer. They have nothing else to do, so a later rank is lost."""
LOOK_S = 0.02
"""Seconds between two checks which ranks have arrived."""
FOR_GOOD = timedelta(days=365)
"""A rank listens until it is called, until there is another weight transfer, or until its process or the server
ends."""


@dataclass(frozen=True)
class TransferAddress:
    """A store for all ranks of both sides, the actor's first.

    host, port: where rank 0 of the actor's pool serves it. file: what it is instead where all ranks are on one machine.
    The rollout's side may be several pools, which are numbered one after the other. first_receiver: the number of this
    pool's first rank among all that receive.
    """

    host: str
    port: int
    num_senders: int
    num_receivers: int
    first_receiver: int = 0
    file: str | None = None

    @property
    def size(self) -> int:
        """Ranks of both pools."""
        return self.num_senders + self.num_receivers

    def receiver(self, rank: int) -> int:
        """The number, among all of both sides, of a rank of the rollout pool that this address was given to."""
        return self.num_senders + self.first_receiver + rank

    def open(self, timeout: timedelta) -> dist.Store:
        """One rank's end of the store; it waits for the server alone."""
        if self.file is not None:
            return file_store(self.file, self.size, timeout)
        return tcp_store(self.host, self.port, self.size, timeout, wait=False)


@dataclass(frozen=True)
class TransferSettings:
    """Settings of a rollout whose weights come from another pool.

    first_replica: the number in the run of the first replica of its pool. second_buffer: whether weights arrive during
    generation, in memory of their own.
    """

    first_replica: int = 0
    second_buffer: bool = False


class TransferStore:
    """The first side of a `TransferAddress`, which makes the store; keep it for as long as the weight transfer is
    used."""

    def __init__(self, rank: Rank, num_receivers: int) -> None:
        host, sizes = rank.environment.node_address, (rank.groups.grid.world_size, num_receivers)
        self.store: dist.Store
        if rank.environment.on_one_machine:
            self.address = TransferAddress(host, 0, *sizes, file=new_store_file())
            self.store = self.address.open(rank.timeout)
        else:
            listener = listen(host, 0, sum(sizes))
            self.address = TransferAddress(host, listener.getsockname()[1], *sizes)
            self.store = tcp_store(host, self.address.port, sum(sizes), rank.timeout, listener.detach(), wait=False)
        self._num_calls = 0

    def call(self, holding: Mapping[int, int]) -> None:
        """Call all ranks that listen to the next transfer. holding: as in `TransferCalls.next`."""
        self._say(json.dumps(holding))

    def close(self) -> None:
        """End the calls for all ranks that listen."""
        self._say(NO_MORE_CALLS)

    def _say(self, text: str) -> None:
        self.store.set(call_key(self._num_calls), text)
        self._num_calls += 1


class TransferCalls:
    """The calls of a `TransferStore`, read by one receiving rank one after the other."""

    def __init__(self, address: TransferAddress, rank: Rank) -> None:
        self._store = address.open(rank.timeout)
        self._num_heard = 0

    def next(self) -> dict[int, int] | None:
        """Wait for the next call; None after the last.

        Returns replica -> the version that its generation must hold before new weights overwrite those that arrived.
        """
        key = call_key(self._num_heard)
        try:
            self._store.wait([key], FOR_GOOD)
            call = json.loads(self._store.get(key))
        except DistError:  # the server's process is gone, and the run with it
            return None
        self._num_heard += 1
        return None if call is None else {int(replica): version for replica, version in call.items()}


def call_key(number: int) -> str:
    """Key of the call of this number."""
    return f"call/{number}"


def here_key(number: int) -> str:
    """Key that a rank sets when it arrives."""
    return f"here/{number}"


def join_transfer(address: TransferAddress, number: int, device: Device, timeout: timedelta) -> Transport:
    """Open the transport between the two pools; collective over both.

    number: this rank's number among all of both. timeout: of a message. Raises BrokenTransferError if a rank does not
    arrive within MEET_S, if connections to it cannot be opened within MEET_S, and if one is lost meanwhile.
    """
    from megatron_rl.hybrid_engine.transport import Transport
    from megatron_rl.hybrid_engine.weight_transfer import BrokenTransferError

    try:
        store = address.open(timeout)
        keys = list(map(here_key, range(address.size)))
        store.set(keys[number], "")
        deadline = time.monotonic() + MEET_S
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise BrokenTransferError(
                    f"ranks {missing} of {address.size} did not connect to the weight transfer in {MEET_S} s"
                )
            made_progress()
            time.sleep(LOOK_S)
        # A message may wait as long as any other; opening connections must not, as all ranks are here.
        group = within(MEET_S, lambda: opened(store, number, address.size, device, timeout))
    except TimeoutError as error:
        raise BrokenTransferError(f"a rank was lost before the weight transfer was connected: {error}") from error
    except RuntimeError as error:  # of the store, or of gloo, whose own is no DistError
        raise BrokenTransferError(f"a weight transfer was not connected: {type(error).__name__}: {error}") from error
    return Transport(group, is_own=True, timeout=timeout)


def opened(store: dist.Store, number: int, size: int, device: Device, timeout: timedelta) -> dist.ProcessGroup:
    """Call `open_joint_group` in a thread of its own, whose device is not this rank's before it is set."""
    from megatron_rl.hybrid_engine.transport import open_joint_group

    device.activate()
    with lost_peers_survived():
        return open_joint_group(store, number, size, device, timeout)


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return or raise the result of `call`; TimeoutError if it takes longer, and its thread is left running."""
    results, errors = list[Result](), list[BaseException]()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="opens a weight transfer", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline:
        made_progress()
        thread.join(LOOK_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no reply after {seconds:g} s")
    return results[0]
