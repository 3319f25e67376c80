"""Keys of roles that a run does not have: what a user sets there changes nothing."""

from __future__ import annotations

from collections.abc import Collection

from megatron_rl.config.keys import CRITIC, REF, followed_keys
from megatron_rl.config.roles import roles_of
from megatron_rl.config.schema import RunConfig

MOST_NAMED = 5
GROUPS = {
    CRITIC: ("critic", (f"{CRITIC}.",)),
    REF: ("reference", (f"{REF}.",)),
    "reward_model": ("reward model", ("reward_model.model.", "reward_model.megatron.")),
}
"""Key of a role -> what it is called, and how the keys begin that nothing else reads."""


def idle_keys(config: RunConfig, given: Collection[str]) -> list[str]:
    """Return a line for each absent role of a PPO run of which keys are given, with the first of them.

    given: the keys that a user has set. A key whose value a key elsewhere follows is not idle. An evaluation leaves
    roles out by itself, and says nothing.
    """
    if not config.generates or config.trainer.val_only:
        return []
    present = {role.key for role in roles_of(config)}
    absent = {key: row for key, row in GROUPS.items() if key not in present}
    if not absent:
        return []
    starts = tuple(f"{group}." for group in absent)
    followed = {leader for key, leader in followed_keys(config).items() if not key.startswith(starts)}
    lines = []
    for group, (name, begins) in absent.items():
        keys = sorted(key for key in given if key.startswith(begins) and key not in followed | {f"{group}.enable"})
        more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
        if keys:
            lines.append(f"without effect: {', '.join(keys[:MOST_NAMED])}{more}, because this run has no {name}")
    return lines
