"""Every kind of role and its class, which the controller names and a rank builds."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.config.roles import (
    ACTOR,
    CRITIC,
    JUDGE,
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
from megatron_rl.roles.judge import Judge
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.reward_training import TrainableRewardModel
from megatron_rl.roles.role import Role
from megatron_rl.roles.rollout import Rollout
from megatron_rl.roles.scoring_roles import Reference, RewardModel, Teacher
from megatron_rl.roles.supervised_policy import SupervisedPolicy
from megatron_rl.roles.transfer_address import TransferSettings

TRAINED: dict[str, type[Actor | Critic | SupervisedPolicy | TrainableRewardModel]] = {
    ACTOR: Actor,
    CRITIC: Critic,
    TUNED: SupervisedPolicy,
    SCORER: TrainableRewardModel,
}
SCORING: dict[str, type[Judge | Reference | RewardModel | Teacher]] = {
    JUDGE: Judge,
    REFERENCE: Reference,
    REWARD_MODEL: RewardModel,
    TEACHER: Teacher,
}
CLASSES: dict[str, type[Role]] = {**TRAINED, **SCORING, ROLLOUT: Rollout}
"""Kind -> class: of roles that are trained, of roles that only score, and of the rollout."""


def build_role(
    spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role], transfer: TransferSettings | None = None
) -> Role:
    """Make a role on this rank. neighbours: the roles that the rank has already. transfer: as for `Rollout`."""
    kind = spec.kind.name
    if kind == ROLLOUT:
        return Rollout(spec, rank, neighbours, transfer)
    return TRAINED[kind](spec, rank) if kind in TRAINED else SCORING[kind](spec, rank, neighbours)
