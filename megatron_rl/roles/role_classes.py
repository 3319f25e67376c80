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
from megatron_rl.roles.critic import Critic
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.reference import InitialReference, Reference
from megatron_rl.roles.reward_model import RewardModel
from megatron_rl.roles.reward_training import TrainableRewardModel
from megatron_rl.roles.role import Role
from megatron_rl.roles.rollout import Rollout
from megatron_rl.roles.supervised_policy import SupervisedPolicy
from megatron_rl.roles.teacher import SelfTeacher, Teacher
from megatron_rl.roles.transfer_address import TransferSettings

ALONE: dict[str, type[Actor | Critic | RewardModel | Teacher | SupervisedPolicy | TrainableRewardModel]] = {
    ACTOR: Actor,
    CRITIC: Critic,
    REWARD_MODEL: RewardModel,
    TEACHER: Teacher,
    TUNED: SupervisedPolicy,
    SCORER: TrainableRewardModel,
}
"""Kind -> class of roles that need no other one."""
CLASSES: dict[str, type[Role]] = {**ALONE, REFERENCE: Reference, ROLLOUT: Rollout}
"""Kind -> class."""
WITH_MODEL_OF_ANOTHER: dict[str, type[InitialReference | SelfTeacher]] = {
    REFERENCE: InitialReference,
    TEACHER: SelfTeacher,
}
"""Kind -> class of roles with `RoleSpec.model_of`."""


def build_role(
    spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role], transfer: TransferSettings | None = None
) -> Role:
    """Make a role on this rank. neighbours: the roles that the rank has already. transfer: as for `Rollout`."""
    kind = spec.kind.name
    if kind == ROLLOUT:
        return Rollout(spec, rank, neighbours, transfer)
    if spec.model_of is not None:
        return WITH_MODEL_OF_ANOTHER[kind](spec, rank, neighbours)
    if kind == REFERENCE:
        return Reference(spec, rank, neighbours)
    return ALONE[kind](spec, rank)
