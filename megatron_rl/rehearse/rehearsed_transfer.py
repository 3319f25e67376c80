"""Weights on their way to another pool in a rehearsal: both ends of a weight transfer, each without the other's
ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.config.roles import ACTOR, ROLLOUT, Placement, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.hybrid_engine.hybrid_engine import HybridEngine
from megatron_rl.hybrid_engine.offload import offloaded
from megatron_rl.hybrid_engine.plan import Member
from megatron_rl.hybrid_engine.weight_transfer import Offer
from megatron_rl.model.families import VOCAB_PADDING
from megatron_rl.parallel.rank_grid import RolloutGrid, rollout_grid
from megatron_rl.planning.run_models import RunModels
from megatron_rl.rehearse.rehearsal_request import all_ranks
from megatron_rl.rehearse.rehearsed_rollout import NoEngine
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.received_weights import received_weights
from megatron_rl.roles.role import Role
from megatron_rl.roles.rollout import all_offloadable
from megatron_rl.roles.transfer_address import TransferAddress, TransferSettings


@dataclass(frozen=True)
class JointRanks:
    """All ranks of a weight transfer, the senders first. numbers: counted over all pools. members: where their shards
    are."""

    numbers: tuple[int, ...]
    members: tuple[Member, ...]
    num_senders: int

    @classmethod
    def of(cls, config: RunConfig) -> JointRanks | None:
        """Return the weight transfer's ranks; None if nothing generates, or actor and rollout share a pool."""
        models = RunModels(config)
        placement = models.placement
        if not placement.generates or placement.is_colocated:
            return None
        pools = [placement.pool_of(ACTOR), placement.pool_of(ROLLOUT)]
        numbers = [rank.number for pool in pools for rank in all_ranks(placement) if rank.pool == pool.name]
        sending, receiving = pools
        senders = models.laid_actor_weights.members(
            range(sending.world_size), RolloutGrid(models.grid, 1), sending.size.num_ranks_per_node, VOCAB_PADDING
        )
        first, per_node, grid = first_node(placement, receiving.name), receiving.size.num_ranks_per_node, models.rollout
        receivers = [
            Member(rank, first + rank // per_node, grid.tp_rank(rank), (), grid.place(rank, VOCAB_PADDING))
            for rank in range(receiving.world_size)
        ]
        return cls(tuple(numbers), (*(replace(one, wanted=None) for one in senders), *receivers), len(senders))

    @property
    def address(self) -> TransferAddress:
        """Return where both sides would meet."""
        return TransferAddress("127.0.0.1", 0, self.num_senders, len(self.members) - self.num_senders)

    def offers(self, mine: Offer) -> list[Offer]:
        """Return what all ranks would offer, where each offers what this one does, but for its own shards."""
        return [
            replace(mine, member=member, sends=number < self.num_senders) for number, member in enumerate(self.members)
        ]


def first_node(placement: Placement, pool: str) -> int:
    """Return the number of a pool's first node, counted over all pools."""
    nodes = 0
    for name, spec in placement.pools.items():
        if name == pool:
            break
        nodes += spec.size.num_nodes
    return nodes


def fake_joint_group(number: int, size: int) -> dist.ProcessGroup:
    """Return a group of `size` ranks, this one with a number and no process behind the others."""
    backend, kind = FakeProcessGroup._create_internal(number, size), dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(FakeStore(), number, size)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
    return group


class RehearsedReceiver:
    """A rollout whose weights come from another pool: all of it but vLLM. On GPUs it has no second buffer."""

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role], address: TransferAddress) -> None:
        """Make the memory for the weights, and this end of the weight transfer, in the order of `Rollout`."""
        source, grid = rank.source(spec), rollout_grid(rank.groups.grid, spec.settings)
        offloadable = all_offloadable(neighbours)
        with offloaded(offloadable):
            self._weights = received_weights(TransferSettings(), spec, rank, source, grid)
        every = spec.settings.verify_weights_every
        self._engine = HybridEngine(self._weights, NoEngine(), rank.device, offloadable, every)
        self._weights.join(address)
        options = rank.config.actor_rollout_ref.actor.megatron.override_transformer_config
        self._moves_biases = options.bias_update_rate > 0

    def enter(self) -> None:
        """Receive weights, and enter rollout mode with them."""
        self._weights.arrivals.receive(with_constants=self._moves_biases)
        self._engine.enter()

    def exit(self) -> None:
        """Leave rollout mode."""
        self._engine.exit()


def same_place(one: Member, other: Member) -> bool:
    """Return whether two descriptions of a member agree, in whatever order they name its shards."""
    return in_order(one) == in_order(other)


def in_order(member: Member) -> Member:
    """Return the member with its shards in the order of its buffers."""
    return replace(member, held=tuple(sorted(member.held, key=lambda slot: (slot.buffer, slot.offset))))


def names_of(member: Member | None) -> Sequence[str]:
    """Return the names of a member's shards, in the order of its buffers; [] for None."""
    return [] if member is None else [slot.name for slot in in_order(member).held]
