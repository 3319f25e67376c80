"""Where the actor's pool and the rollout's pool meet, when they are two worlds: a store of their own."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_rl.roles.rank import Rank

if TYPE_CHECKING:
    from megatron_rl.hybrid_engine.transport import Transport


@dataclass(frozen=True)
class BridgeAddress:
    """A store that rank 0 of the actor's pool serves, for all ranks of both pools, the actor's first."""

    host: str
    port: int
    num_senders: int
    num_receivers: int

    @property
    def size(self) -> int:
        """Ranks of both pools."""
        return self.num_senders + self.num_receivers


class BridgeStore:
    """The server's side of a `BridgeAddress`; keep it for as long as the bridge is used."""

    def __init__(self, rank: Rank, num_receivers: int) -> None:
        host = rank.environment.node_address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        num_senders = rank.groups.grid.world_size
        listener = socket.create_server((host, 0), family=family, backlog=num_senders + num_receivers)
        self.address = BridgeAddress(host, listener.getsockname()[1], num_senders, num_receivers)
        self.store = dist.TCPStore(
            host,
            self.address.port,
            self.address.size,
            is_master=True,
            wait_for_workers=False,
            timeout=rank.timeout,
            master_listen_fd=listener.detach(),  # the store closes it
            use_libuv=True,  # the other server takes no socket from its caller
        )


def join_bridge(address: BridgeAddress, number: int, rank: Rank) -> Transport:
    """The way between the two pools; collective over both. number: this rank's among all of both."""
    from megatron_rl.hybrid_engine.transport import Transport, open_joint_group

    store = dist.TCPStore(
        address.host,
        address.port,
        address.size,
        is_master=False,
        wait_for_workers=False,
        timeout=rank.timeout,
        use_libuv=True,
    )
    return Transport(open_joint_group(store, number, address.size, rank.device, rank.timeout))
