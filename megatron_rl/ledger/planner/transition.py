"""What the transition to rollout mode moves: in place the hybrid engine's own plan, between pools whole shards."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from megatron_rl.ledger.planner.hardware import Hardware
from megatron_rl.ledger.planner.run_models import RunModels
from megatron_rl.ledger.planner.time import LINK_EFFICIENCY
from megatron_rl.ledger.planner.weights import stage_params, tensors_of
from megatron_rl.model.families import VOCAB_PADDING
from megatron_rl.parallel.sharding import box_numel, shard_of


@dataclass(frozen=True)
class TransitionPlan:
    """Bytes that ranks receive, over the network and inside of their node.

    In place of each rank of an exchange group; the groups are alike. model_bytes: M. lower_bound: the closed form
    M / t_g - M / (t * p) for weights cut evenly. Ranks differ from it by tensors that all TP ranks hold whole, by what
    the first and last stage hold beside layers, and by uneven stages.

    Where the rollout has another pool: of each rank of one replica, which receives its whole shard, M / t_g; replicas
    pass it on. sent: what each rank of the actor's pool sends, M in all; None in place.
    """

    network: tuple[int, ...]
    link: tuple[int, ...]
    model_bytes: int
    lower_bound: float
    sent: tuple[int, ...] | None = None

    @classmethod
    def of(cls, models: RunModels) -> TransitionPlan:
        """Counted piece by piece."""
        return cls._in_place(models) if models.placement.is_colocated else cls._between_pools(models)

    @classmethod
    def _in_place(cls, models: RunModels) -> TransitionPlan:
        layers, element = models.alike_layers, models.element
        network, link = [], []
        for number in range(len(layers.plan.members)):
            network.append(layers.over_network(number) * element)
            link.append(layers.received(number) * element - network[-1])
        model_bytes = models.actor.num_params * element
        grid, rollout_tp = models.grid, models.rollout.tp_size
        held = grid.tp_size * grid.pp_size
        return cls(tuple(network), tuple(link), model_bytes, max(0.0, model_bytes / rollout_tp - model_bytes / held))

    @classmethod
    def _between_pools(cls, models: RunModels) -> TransitionPlan:
        """All over the network: pools are taken to have machines of their own."""
        tensors, rollout = tensors_of(models.actor.specs).values(), models.rollout
        received = []
        for rank in rollout.tp_groups()[0]:
            shards = [shard_of(tensor, rollout.place(rank, VOCAB_PADDING)) for tensor in tensors]
            received.append(sum(box_numel(part.box) for shard in shards for part in shard.parts) * models.element)
        model_bytes = models.actor.num_params * models.element
        return cls(
            tuple(received),
            (0,) * len(received),
            model_bytes,
            model_bytes / rollout.tp_size,
            tuple(_sent_bytes(models)),
        )

    @property
    def mean_network(self) -> float:
        """Bytes over the network per GPU."""
        return statistics.fmean(self.network)

    @property
    def mean_link(self) -> float:
        """Bytes inside of nodes per GPU."""
        return statistics.fmean(self.link)

    def seconds(self, hardware: Hardware) -> float:
        """Until the slowest rank has everything; what comes over the network is passed on inside a node afterwards.

        Between pools sending, receiving and passing on to further replicas overlap, so that the most that one rank
        sends or receives decides.
        """
        received = max(
            far / hardware.network_bandwidth + near / hardware.link_bandwidth
            for far, near in zip(self.network, self.link, strict=True)
        )
        sent = max(self.sent or (0,)) / hardware.network_bandwidth
        return max(received, sent) / LINK_EFFICIENCY + hardware.overheads.transition


def _sent_bytes(models: RunModels) -> list[int]:
    """Of every rank of the actor's pool: each stage sends what it holds once, spread evenly over its ranks."""
    specs, grid, found = models.actor.specs, models.grid, []
    stages = models.training.stages(models.actor)
    sent: set[str] = set()
    for pp_rank in range(grid.pp_size):
        names = {specs[name].tensor.name for chunk in stage_params(specs, stages, pp_rank) for name in chunk} - sent
        sent |= names
        numel = sum(tensor.numel for name, tensor in tensors_of(specs).items() if name in names)
        share, rest = divmod(numel, grid.stage_size)
        found += [(share + (number < rest)) * models.element for number in range(grid.stage_size)]
    return found
