"""Rewards of a function that gets whole groups: each is scored once, as soon as its last response has ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.records import Batch
from megatron_rl.scoring.function import RewardSource
from megatron_rl.scoring.group_function import Group, GroupFacts, GroupRewardSource, Row, row_of
from megatron_rl.scoring.outcome import Outcome, Sample
from megatron_rl.scoring.reward_processes import RewardHere, RewardProcesses
from megatron_rl.scoring.rule import Ended, RuleReward


class GroupReward(RuleReward):
    """Scores the responses of each group together, without episodes that failed: these have `failed_score`."""

    def __init__(
        self,
        processes: RewardProcesses | RewardHere,
        tokenizer: PreTrainedTokenizerBase,
        failed_score: float = 0.0,
        stop_if_all_failed: bool = True,
    ):
        super().__init__(processes, tokenizer, failed_score, stop_if_all_failed)
        self._ended: dict[int, dict[int, Row]] = {}  # number of a group's first response -> those that have ended

    def begin(self, answer: Ended) -> None:
        """Keep a response, and score its group if it was the last one. Raises RewardError as `RuleReward.begin`."""
        reward = answer.environment_reward
        if reward is not None:
            reward = torch.tensor(reward, dtype=torch.float32).item()  # as the batch has it
        facts = (answer.row["index"], answer.row["sample"], answer.num_sampled, answer.truncated, reward)
        if not answer.group:
            return
        first = answer.group[0]
        ended = self._ended.setdefault(first, {})
        ended[answer.number] = row_of(self.sample_of(answer), GroupFacts(*facts))
        if len(ended) == len(answer.group):
            self.processes.begin(first, Group([ended[number] for number in answer.group]))
            del self._ended[first]

    def outcomes(self, samples: Sequence[Sample], rows: Batch, numbers: Sequence[int]) -> list[Outcome]:
        """Return an outcome for each response; `self.unasked` for an episode that failed."""
        known_rows = rows_of_groups(samples, rows)
        members: dict[int, list[int]] = {}
        first_rows: dict[int, int] = {}
        for row, uid in enumerate(rows["uid"].tolist()):
            first_rows.setdefault(uid, row)
            if known_rows[row] is not None:
                members.setdefault(uid, []).append(row)
        begun = [numbers[first_rows[uid]] for uid in members] if numbers else ()
        for row in first_rows.values() if numbers else ():
            self._ended.pop(numbers[row], None)  # is left of a group with a failed episode
        groups = [Group([known for row in own if (known := known_rows[row]) is not None]) for own in members.values()]
        outcomes = [self.unasked] * len(samples)
        for own, scored in zip(members.values(), self.processes.score_groups(groups, begun), strict=True):
            for row, outcome in zip(own, scored, strict=True):
                outcomes[row] = outcome
        return outcomes


def reward_of(source: RewardSource | GroupRewardSource) -> type[RuleReward]:
    """Return the class that scores by a function from `source`."""
    return GroupReward if isinstance(source, GroupRewardSource) else RuleReward


def rows_of_groups(samples: Sequence[Sample], rows: Batch) -> list[Row | None]:
    """Return each response as the user's function gets it; None for an episode that failed."""
    rewards, failed = rows.get("environment_rewards"), rows.get("failed")
    columns = (
        rows["index"].tolist(),
        rows["sample"].tolist(),
        rows.num_sampled.tolist(),
        rows["truncated"].tolist(),
        [None] * len(samples) if rewards is None else rewards.tolist(),
    )
    is_failed = [False] * len(samples) if failed is None else failed.tolist()
    facts = [GroupFacts(*values) for values in zip(*columns, strict=True)]
    return [
        None if lost else row_of(sample, known) for sample, known, lost in zip(samples, facts, is_failed, strict=True)
    ]
