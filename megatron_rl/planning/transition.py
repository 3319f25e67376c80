"""Bytes of the resharding to rollout mode: in place by the hybrid engine's plan, between pools whole shards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.model.families import CORRECTION, VOCAB_PADDING, ParamSpec, tensors_of
from megatron_rl.model.parts import FP32
from megatron_rl.parallel.scale_blocks import SCALES
from megatron_rl.parallel.sharding import box_numel, shard_of
from megatron_rl.planning.exchange_counts import ExchangeCounts
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.run_models import RunModels, transferred
from megatron_rl.planning.time import LINK_EFFICIENCY
from megatron_rl.planning.weights import TrainedWeights

EVENLY_CUT, WHOLE_EXPERTS = "M / rollout TP - M / (TP x PP)", "M / rollout TP - weights that a rank has in both"
SHARED_EXPERTS = "dense / rollout TP + experts / rollout EP - weights that a rank has in both"
"""Closed forms in place, with experts that rollout TP cuts, with whole ones, and with those that TP groups share."""


@dataclass(frozen=True)
class TransitionPlan:
    """Bytes that ranks receive: network from other nodes, link inside of their node.

    In place there is one entry for each rank of an exchange group; all groups are alike. model_bytes: M. lower_bound:
    the closed form M / t_g - M / (t * p) for evenly sharded weights. Ranks differ from it by tensors that all TP ranks
    hold whole, by the vocabulary matrices of the first and last stage, and by uneven stages.

    With a rollout in its own pool there is one entry for each rank of one replica, which receives its whole shard,
    M / t_g; replicas pass it on. sent: bytes that each rank of the actor's pool sends, M in all; None in place.

    With adapters M is what moves in every step: adapters alone where the base stays. once: the base's resharding then,
    before the first step; None: all that moves moves in every step. formula: of lower_bound, in words.
    """

    network: tuple[int, ...]
    link: tuple[int, ...]
    model_bytes: int
    lower_bound: float
    sent: tuple[int, ...] | None = None
    once: TransitionPlan | None = None
    formula: str = EVENLY_CUT

    @classmethod
    def of(cls, models: RunModels) -> TransitionPlan:
        """Count the resharding of a run piece by piece."""
        weights = [each for each in (models.actor_weights, models.actor_adapters) if each is not None]
        if models.placement.is_colocated:
            planned, element = models.resharding, models.element
            fp8, adapters = planned.fp8, planned.adapter_exchange
            moved = fp8.moved if fp8 is not None else [(element, planned.exchange)]
            model_bytes = fp8.model_bytes if fp8 is not None else numel_of(weights[0].params.specs) * element
            parts = [cls._in_place(models, moved, model_bytes)]
            if adapters is not None:
                parts.append(cls._in_place(models, [(element, adapters)], numel_of(weights[1].params.specs) * element))
        else:
            parts = [cls._between_pools(models, each) for each in weights]
        if len(parts) == 1:
            return parts[0]
        return replace(parts[1], once=parts[0]) if models.keeps_base else parts[0].plus(parts[1])

    @classmethod
    def _in_place(
        cls, models: RunModels, moved: Sequence[tuple[int, ExchangeCounts]], model_bytes: int
    ) -> TransitionPlan:
        """Return the plan of exchanges. moved: (bytes of an element, counts) of each. model_bytes: of a whole model."""
        network, link = [], []
        for number in range(len(moved[0][1].members)):
            network.append(sum(size * counts.network_numels[number] for size, counts in moved))
            link.append(sum(size * counts.received_numels[number] for size, counts in moved) - network[-1])
        grid, rollout = models.grid, models.rollout
        held, formula = model_bytes / (grid.tp_size * grid.pp_size), EVENLY_CUT
        if rollout.ep_size > 1:
            held = model_bytes * kept_share(models)
            formula = WHOLE_EXPERTS if rollout.dp_size == 1 else SHARED_EXPERTS
        bound = max(0.0, model_bytes * needed_share(models) - held)
        return cls(tuple(network), tuple(link), model_bytes, bound, formula=formula)

    @classmethod
    def _between_pools(cls, models: RunModels, weights: TrainedWeights) -> TransitionPlan:
        """Count everything as network traffic: pools are assumed to have their own machines. With the weights come the
        biases of experts, if they move.
        """
        (tensors, size), rollout = transferred(models, weights.params.specs), models.rollout
        received, biases = [], bias_bytes(models)
        for rank in rollout.replicas()[0]:
            shards = [shard_of(tensor, rollout.place(rank, VOCAB_PADDING)) for tensor in tensors.values()]
            numel = sum(box_numel(part.box) for shard in shards for part in shard.parts)
            received.append(numel * size + biases)
        model_bytes = sum(tensor.numel for tensor in tensors.values()) * size
        first, *others = sent_bytes(models, weights)
        return cls(
            tuple(received),
            (0,) * len(received),
            model_bytes + biases,
            model_bytes * needed_share(models) + biases,
            (first + biases, *others),
        )

    def plus(self, other: TransitionPlan) -> TransitionPlan:
        """Return both, one after the other, between the same ranks."""
        network, link = (
            tuple(map(sum, zip(mine, theirs, strict=True)))
            for mine, theirs in ((self.network, other.network), (self.link, other.link))
        )
        sent = None if self.sent is None else tuple(map(sum, zip(self.sent, other.sent or (), strict=True)))
        model_bytes, lower_bound = self.model_bytes + other.model_bytes, self.lower_bound + other.lower_bound
        return TransitionPlan(network, link, model_bytes, lower_bound, sent, formula=self.formula)

    @property
    def mean_network(self) -> float:
        """Mean bytes over the network per GPU."""
        return statistics.fmean(self.network)

    @property
    def mean_link(self) -> float:
        """Mean bytes inside of nodes per GPU."""
        return statistics.fmean(self.link)

    @property
    def received(self) -> list[int]:
        """Bytes that each rank receives, from wherever they come."""
        return [sum(sizes) for sizes in zip(self.network, self.link, strict=True)]

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds until the slowest rank has everything: network first, then links inside of its node.

        Between pools sending, receiving and passing on to other replicas overlap, so that the largest number of bytes
        that one rank sends or receives decides. What moves once is not part of it.
        """
        received = max(
            far / hardware.network_bandwidth + near / hardware.link_bandwidth
            for far, near in zip(self.network, self.link, strict=True)
        )
        sent = max(self.sent or (0,)) / hardware.network_bandwidth
        return max(received, sent) / LINK_EFFICIENCY + hardware.overheads.transition


def kept_share(models: RunModels) -> float:
    """Return the mean share of a model that a rank has in training and in generation, of stages that are alike."""
    rollout, experts = models.rollout, experts_share(models)
    ranks = models.grid.exchange_group(0)
    of_dense, of_experts = (
        statistics.fmean(rollout.kept_share(rank, of_experts=which) for rank in ranks) for which in (False, True)
    )
    return ((1 - experts) * of_dense + experts * of_experts) / models.grid.pp_size


def needed_share(models: RunModels) -> float:
    """Return the share of a model with which a rank generates: TP cuts all but experts, which the replica shares."""
    rollout = models.rollout
    if rollout.dp_size == 1:
        return 1 / rollout.tp_size
    experts = experts_share(models)
    return (1 - experts) / rollout.tp_size + experts / rollout.ep_size


def experts_share(models: RunModels) -> float:
    """Return the share of the policy's weights that experts have."""
    tensors = tensors_of(models.actor.specs).values()
    return sum(tensor.numel for tensor in tensors if tensor.is_expert) / sum(tensor.numel for tensor in tensors)


def bias_bytes(models: RunModels) -> int:
    """Return the bytes of the biases of experts that a transfer between pools brings, once updates move them."""
    if not models.actor_role.megatron.override_transformer_config.bias_update_rate:
        return 0
    constants = models.actor.constants.items()
    return FP32 * sum(math.prod(bias.shape) for name, bias in constants if name.endswith(CORRECTION))


def numel_of(specs: Mapping[str, ParamSpec]) -> int:
    """Return the elements of whole tensors, without padding of the vocabulary; a tied matrix once."""
    return sum(tensor.numel for tensor in tensors_of(specs).values())


def sent_bytes(models: RunModels, weights: TrainedWeights) -> list[int]:
    """Return the bytes that every rank of the actor's pool sends: each stage once, spread evenly over its ranks."""
    specs, grid, sent_bytes = weights.params.specs, models.grid, []
    tensors, size = transferred(models, specs)
    sent: set[str] = set()
    for pp_rank in range(grid.pp_size):
        names = {specs[name].tensor.name for name in weights.names(pp_rank)} - sent
        sent |= names
        numel = sum(tensor.numel for name, tensor in tensors.items() if name.removesuffix(SCALES) in names)
        share, rest = divmod(numel, grid.stage_size)
        sent_bytes += [(share + (number < rest)) * size for number in range(grid.stage_size)]
    return sent_bytes
