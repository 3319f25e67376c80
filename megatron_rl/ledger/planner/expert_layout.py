"""Rules of expert parallelism: how experts may be distributed over the ranks of one pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.config.problems import divisors, nearest_number
from megatron_rl.config.roles import ACTOR, RoleSpec
from megatron_rl.errors import Violation
from megatron_rl.ledger.planner.model_folder import ModelSizes


@dataclass(frozen=True)
class ExpertLayouts:
    """The EP and ETP sizes that fit all models with experts and the ranks of one stage."""

    stage_size: int
    models: list[ModelSizes]

    @property
    def ep_sizes(self) -> list[int]:
        """EP sizes that give each rank the same number of whole experts."""
        return self._dividing(model.num_experts for model in self.models)

    @property
    def etp_sizes(self) -> list[int]:
        """ETP sizes that shard every expert evenly."""
        return self._dividing(model.moe_intermediate_size for model in self.models)

    def nearest(self, ep_size: int, etp_size: int) -> tuple[int, int]:
        """Return the valid (ep, etp) with the smallest distance in doublings and halvings."""
        valid = [(e, t) for e in self.ep_sizes for t in self.etp_sizes if self.stage_size % (e * t) == 0]
        return min(valid, key=lambda pair: abs(math.log2(pair[0] / ep_size)) + abs(math.log2(pair[1] / etp_size)))

    def _dividing(self, numbers: Iterable[int]) -> list[int]:
        return divisors(math.gcd(self.stage_size, *numbers))


def expert_problems(leader: RoleSpec, world_size: int, models: list[ModelSizes]) -> Iterable[Violation]:
    """Check EP, ETP and sequence parallelism against the ranks of a pool and the models of its roles.

    leader: the role whose keys are the pool's layout. Other rules check sizes below 1, and TP, CP and PP against the
    ranks.
    """
    megatron, group = leader.megatron, f"{leader.key}.megatron"
    ep_key, etp_key = f"{group}.expert_model_parallel_size", f"{group}.expert_tensor_parallel_size"
    tp_size, pp_size, ep_size = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.expert_model_parallel_size,
    )
    cp_size = megatron.context_parallel_size
    etp_size = megatron.expert_tensor_parallel_size
    if etp_size is None:
        etp_size = tp_size
    if min(tp_size, pp_size, cp_size, ep_size, etp_size, world_size) < 1 or world_size % (tp_size * cp_size * pp_size):
        return
    with_experts = [model for model in models if model.num_experts]
    layouts = ExpertLayouts(world_size // pp_size, with_experts)
    if ep_size > 1 and models and not with_experts:
        yield Violation({ep_key: ep_size}, f"needs a model with experts, and {models[0].path} has none", {ep_key: 1})
        ep_size = 1  # the other rules are for what it must become
    if layouts.stage_size % (etp_size * ep_size):
        ep, etp = layouts.nearest(ep_size, etp_size)
        rule = f"must divide the {layouts.stage_size} ranks of a stage ({world_size} ranks / pp({pp_size}))"
        nearest = {ep_key: ep} | ({} if etp == etp_size else {etp_key: etp})
        subject = f"etp({etp_size}) * ep({ep_size})" + ("" if leader.kind == ACTOR else f" of {group}")
        given = {ep_key: megatron.expert_model_parallel_size, etp_key: megatron.expert_tensor_parallel_size}
        yield Violation(given, rule, nearest, subject=subject)
    for model in with_experts:
        if model.num_experts % ep_size:
            rule = f"must divide num_experts({model.num_experts}) of {model.path}"
            yield Violation({ep_key: ep_size}, rule, {ep_key: nearest_number(ep_size, layouts.ep_sizes)})
        if model.moe_intermediate_size % etp_size:
            rule = f"must divide {model.expert_size_key}({model.moe_intermediate_size}) of {model.path}"
            nearest = {etp_key: nearest_number(etp_size, layouts.etp_sizes)}
            given = {etp_key: megatron.expert_tensor_parallel_size}
            yield Violation(given, rule, nearest, subject=f"etp({etp_size})")
    if with_experts and tp_size > 1 and not megatron.sequence_parallel:
        key = f"{group}.sequence_parallel"
        yield Violation({key: False}, f"must be true: training experts with tp({tp_size}) > 1 needs it", {key: True})
