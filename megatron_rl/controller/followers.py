"""Weights of a policy for roles of other pools that follow it: a reference that moves, a teacher that is the policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar, cast

from megatron_rl.config.roles import Placement, RoleSpec
from megatron_rl.roles.policy_followers import FollowedPolicy, FollowingScorer
from megatron_rl.roles.role_classes import CLASSES

Kind = TypeVar("Kind")


class BuiltRoles(Protocol):
    """The roles of a run on the ranks of their pools."""

    @property
    def placement(self) -> Placement:
        """Roles and pools."""

    def handle(self, name: str, kind: type[Kind]) -> Kind:
        """The handle of a role."""


def connect_followers(pools: BuiltRoles) -> None:
    """Connect the pools of every policy and of the roles that follow it, once these are built."""
    for role in pools.placement.followers:
        policy, follower = ends_of(pools, role)
        address = policy.offer_to(role.name, pools.placement.pool_of(role.name).world_size).get()
        joining = policy.join_follower(role.name, address), follower.join_policy(address)
        for end in joining:
            end.get()


def before_first_step(pools: BuiltRoles, step: int) -> None:
    """Send the weights after step `step`, at which a run begins, to roles that are the policy in every step."""
    send(pools, (role for role in pools.placement.followers if role.follows and not role.follows.is_kept), step)


def after_step(pools: BuiltRoles, step: int) -> None:
    """Send the weights after a step to the roles that take them then."""
    send(pools, (role for role in pools.placement.followers if role.follows and step % role.follows.every == 0), step)


def send(pools: BuiltRoles, roles: Iterable[RoleSpec], step: int) -> None:
    """Send the weights after a step to roles; returns when these have mixed them in."""
    for role in roles:
        policy, follower = ends_of(pools, role)
        moving = policy.send_to(role.name, step), follower.take_weights(step)
        for end in moving:
            end.get()


def ends_of(pools: BuiltRoles, role: RoleSpec) -> tuple[FollowedPolicy, FollowingScorer]:
    """The handles of the policy that a role follows, and of the role."""
    assert role.follows is not None
    leader = pools.placement.roles[role.follows.leader]
    policy, follower = (pools.handle(one.name, CLASSES[one.kind.name]) for one in (leader, role))
    return cast(FollowedPolicy, policy), cast(FollowingScorer, follower)
