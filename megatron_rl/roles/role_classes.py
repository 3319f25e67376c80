"""Every kind of role and its class, which the controller names and a rank builds."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.config.roles import (
    ACTOR,
    CRITIC,
    REFERENCE,
    REWARD_MODEL,
    ROLLOUT,
    SCORER,
    TEACHER,
    TUNED,
    RoleSpec,
)
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.bridge_address import AcrossBridge
from megatron_rl.roles.critic import Critic
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.reference import InitialReference, Reference
from megatron_rl.roles.reward_model import RewardModel
from megatron_rl.roles.reward_training import TrainableRewardModel
from megatron_rl.roles.role import Role
from megatron_rl.roles.rollout import Rollout
from megatron_rl.roles.supervised_policy import SupervisedPolicy
from megatron_rl.roles.teacher import SelfTeacher, Teacher

MODEL_KINDS: dict[str, type[Actor | Critic | RewardModel | Teacher | SupervisedPolicy | TrainableRewardModel]] = {
    ACTOR: Actor,
    CRITIC: Critic,
    REWARD_MODEL: RewardModel,
    TEACHER: Teacher,
    TUNED: SupervisedPolicy,
    SCORER: TrainableRewardModel,
}
KINDS: dict[str, type[Role]] = {**MODEL_KINDS, REFERENCE: Reference, ROLLOUT: Rollout}
"""Kind -> class."""


def build_role(spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role], bridge: AcrossBridge | None = None) -> Role:
    """Make a role on this rank. neighbours: the roles that the rank has already. bridge: as for `Rollout`."""
    if spec.kind == ROLLOUT:
        return Rollout(spec, rank, neighbours, bridge)
    if spec.model_of is not None:
        return (SelfTeacher if spec.kind == TEACHER else InitialReference)(spec, rank, neighbours)
    if spec.kind == REFERENCE:
        return Reference(spec, rank, neighbours)
    return MODEL_KINDS[spec.kind](spec, rank)
