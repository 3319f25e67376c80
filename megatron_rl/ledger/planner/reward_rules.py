"""Rules of statistics that normalise the scores of reward models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_rl.checkpoint.score_statistics import StatisticsError, read_statistics
from megatron_rl.config.reward_keys import HELD_OUT, RUNNING
from megatron_rl.config.roles import REWARD_MODEL, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation


def statistics_problems(config: RunConfig) -> Iterable[Violation]:
    """Reward models whose folder lacks the statistics that normalize_reward=held_out needs."""
    for role in roles_of(config):
        if role.kind != REWARD_MODEL or role.model_path is None or role.settings.normalize_reward != HELD_OUT:
            continue
        folder = Path(role.model_path).expanduser()
        if not folder.is_dir():
            continue  # the folder's own rules report it
        try:
            read_statistics(folder)
        except StatisticsError as error:
            key = f"{role.key}.normalize_reward"
            rule = f"needs the mean and spread of held-out scores in {role.model_key}={role.model_path}: {error}"
            hint = "megatron-rl reward writes them into the folder of the model that it exports"
            yield Violation({key: HELD_OUT}, rule, {key: RUNNING}, hint)
