"""Where the actor's pool and the rollout's pools meet, when they are worlds apart: a store of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.roles.rank import Rank
from megatron_rl.roles.rendezvous import listen, tcp_store

if TYPE_CHECKING:
    from megatron_rl.hybrid_engine.transport import Transport


@dataclass(frozen=True)
class BridgeAddress:
    """A store that rank 0 of the actor's pool serves, for all ranks of both sides, the actor's first.

    The rollout's side may be several pools, which are numbered one after the other; each is told where it begins:
    first_receiver: the number of its first rank among all that receive. first_replica: the number of its first replica
    in the run, which it keeps when others are lost. second_buffer: whether weights arrive beside generation, in memory
    of their own.
    """

    host: str
    port: int
    num_senders: int
    num_receivers: int
    first_receiver: int = 0
    first_replica: int = 0
    second_buffer: bool = False

    @property
    def size(self) -> int:
        """Ranks of both pools."""
        return self.num_senders + self.num_receivers

    def receiver(self, rank: int) -> int:
        """The number, among all of both sides, of a rank of the rollout pool that this address was given to."""
        return self.num_senders + self.first_receiver + rank


class BridgeStore:
    """The server's side of a `BridgeAddress`; keep it for as long as the bridge is used."""

    def __init__(self, rank: Rank, num_receivers: int) -> None:
        host, num_senders = rank.environment.node_address, rank.groups.grid.world_size
        listener = listen(host, 0, num_senders + num_receivers)
        self.address = BridgeAddress(host, listener.getsockname()[1], num_senders, num_receivers)
        self.store = tcp_store(host, self.address.port, self.address.size, rank.timeout, listener.detach(), wait=False)


def join_bridge(address: BridgeAddress, number: int, rank: Rank) -> Transport:
    """The way between the two pools; collective over both. number: this rank's among all of both."""
    from megatron_rl.hybrid_engine.transport import Transport, open_joint_group

    store = tcp_store(address.host, address.port, address.size, rank.timeout, wait=False)
    return Transport(open_joint_group(store, number, address.size, rank.device, rank.timeout), is_own=True)
