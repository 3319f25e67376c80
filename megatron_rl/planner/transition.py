"""What the transition to rollout mode moves: the hybrid engine's own plan, counted by the way the bytes take."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from megatron_rl.planner.hardware import Hardware
from megatron_rl.planner.run_models import RunModels
from megatron_rl.planner.time import LINK_EFFICIENCY


@dataclass(frozen=True)
class TransitionPlan:
    """Bytes that each rank of an exchange group receives, from other nodes and from its own; the groups are alike.

    lower_bound: the closed form M / t_g - M / (t * p), for M bytes of weights cut evenly. Ranks differ from it by
    tensors that all TP ranks hold whole, by what the first and last stage hold beside layers, and by uneven stages.
    """

    network: tuple[int, ...]
    link: tuple[int, ...]
    model_bytes: int
    lower_bound: float

    @classmethod
    def of(cls, models: RunModels) -> TransitionPlan:
        """Counted piece by piece."""
        exchange, element = models.exchange, models.element
        network, link = [], []
        for number, plan in enumerate(exchange.plans):
            network.append(exchange.numel_over_network(number) * element)
            link.append(sum(piece.numel for piece in plan.received) * element - network[-1])
        model_bytes = models.actor.num_params * element
        grid, rollout_tp = models.grid, models.rollout.tp_size
        held = grid.tp_size * grid.pp_size
        return cls(tuple(network), tuple(link), model_bytes, max(0.0, model_bytes / rollout_tp - model_bytes / held))

    @property
    def mean_network(self) -> float:
        """Bytes over the network per GPU."""
        return statistics.fmean(self.network)

    @property
    def mean_link(self) -> float:
        """Bytes inside of nodes per GPU."""
        return statistics.fmean(self.link)

    def seconds(self, hardware: Hardware) -> float:
        """Until the slowest rank has everything; what comes over the network is passed on inside a node afterwards."""
        return max(
            (far / hardware.network_bandwidth + near / hardware.link_bandwidth) / LINK_EFFICIENCY
            for far, near in zip(self.network, self.link, strict=True)
        )
