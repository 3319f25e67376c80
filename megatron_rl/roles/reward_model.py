"""A reward model: a frozen classifier with one label, which scores prompt and answer as a whole."""

from __future__ import annotations

import torch

from megatron_rl.config.roles import RoleSpec
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import is_reward_model
from megatron_rl.records import Batch, ragged, single_turn
from megatron_rl.roles.critic import values_before
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import FrozenRole


class RewardModel(FrozenRole):
    """Scores of sequences; in train mode only, because the model may be offloaded during generation."""

    def __init__(self, spec: RoleSpec, rank: Rank) -> None:
        """Load trunk and head. Raises ConfigError for a folder without a learned head."""
        source = rank.source(spec)
        if not is_reward_model(source.hf_config.architectures):
            raise ConfigError(f"{source.path} ({source.hf_config.architectures}) has no head that gives a score")
        super().__init__(spec, rank, source.value_model(head_seed=0))

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def scores(self, batch: Batch) -> Batch | None:
        """`scores`, the head's output at the last token of each row, sampled or not; None before the last stage.

        transformers' `...ForSequenceClassification` gives the same to a right-padded row.
        """
        flat = self.pipeline.forward(with_one_more_token(batch), self.cut, values_before)
        return None if flat is None else Batch(scores=flat)


def with_one_more_token(batch: Batch) -> Batch:
    """Rows in which one token after the last counts as sampled: the value *before* it is the value of the sequence, the
    last one of a row with several conversations.
    """
    rows = [torch.cat([row, row.new_zeros(1)]) for row in batch["input_ids"].unbind()]
    anew = batch.get("conversation_starts")
    starts = None if anew is None else ragged([torch.cat([row, row.new_zeros(1)]) for row in anew.unbind()])
    return single_turn(ragged(rows), torch.ones(len(rows), dtype=torch.int64), conversation_starts=starts)
