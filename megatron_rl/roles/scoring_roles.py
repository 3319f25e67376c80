"""Roles that only score: the reference of the KL penalty, teachers, reward models.

What a loss needs of a role is a method here, which the role's row in `config/roles.py` names. Every score is a pass of
the whole pool: all ranks must call, the last stage returns columns, and the stages before it None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.columns import SCORING
from megatron_rl.config.algorithms import STUDENTS_TOP
from megatron_rl.config.reward_keys import TURN_ENDS
from megatron_rl.config.roles import ACTOR, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.losses.rows import sum_rows
from megatron_rl.records import Batch, conversations, ragged, ragged_from_lengths, row_lengths, single_turn
from megatron_rl.roles.critic import values_before
from megatron_rl.roles.policy_followers import FollowingScorer, of_scoring_roles
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.read_model import ScoringRole
from megatron_rl.roles.role import Role, TrainedRole


class Reference(FollowingScorer):
    """Scores tokens as the policy did before training, or when this reference last moved to it."""

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> None:
        """Read the weights. neighbours: the roles of this rank, with the policy if the reference has its model or may
        move to it.
        """
        super().__init__(spec, rank, neighbours)
        if spec.score is None or spec.score.call.makes is None:
            raise ValueError(f"the row of role {spec.name} does not name the column that it fills")
        self.column, model = spec.score.call.makes, self.model
        self.scorer = model.scorer(
            model.source.folder.num_sampled_tokens(rank.config), rank.config.temperature, rank.unsampled
        )
        if spec.settings.sync_ref_model and spec.follows is None:
            self._follow(cast(TrainedRole, neighbours[ACTOR]))

    def _follow(self, policy: TrainedRole) -> None:
        """Become part of the policy's checkpoint, and able to move to the policy."""
        from megatron_rl.checkpoint.saved_tensors import REFERENCE_BIAS
        from megatron_rl.roles.model_source import named_buffers
        from megatron_rl.roles.reference_refresh import ReferenceRefresh

        biases, leader = None, policy.checkpoint.bias
        if leader is not None and self.spec.model_of is None:
            biases = leader.of_copy(named_buffers(self.model.models), REFERENCE_BIAS), leader
        theirs, alpha = of_scoring_roles(policy.trained.parameters), self.spec.settings.ref_model_mixup_alpha
        self.following = ReferenceRefresh(self.model.following, theirs, alpha, biases)
        policy.checkpoint.reference = self.following

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs(self, batch: Batch) -> Batch | None:
        """The log-prob of each sampled token, in the column of the role's row."""
        with self.model.reading():
            return self.scorer.score(self.column, batch, self.cut)

    @remote_method(Dispatch.ONE_TO_ALL, stop=Stop.NEVER_AFTER)
    def refresh(self) -> None:
        """Move to the policy on the same ranks by `ref_model_mixup_alpha`; only with `sync_ref_model`."""
        self.following.refresh()


class Teacher(FollowingScorer):
    """A model whose distributions the actor learns from: of a folder of its own, or the actor as it is in this step."""

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> None:
        """Read the weights. neighbours: the roles of this rank, with the actor if it is the teacher."""
        super().__init__(spec, rank, neighbours)
        num_tokens = compared_tokens(rank, self.model.source.hf_config.vocab_size)
        self.scorer = self.model.scorer(num_tokens, rank.config.temperature, rank.unsampled)
        self.num_top = num_compared(rank.config, num_tokens)

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs(self, batch: Batch) -> Batch | None:
        """`teacher_log_probs`, the log-prob of each sampled token."""
        return self.scorer.score("teacher_log_probs", batch, self.cut)

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def top_k(self, batch: Batch) -> Batch | None:
        """`teacher_top_ids` and `teacher_top_log_probs` of the `topk` likeliest tokens."""
        best = self.scorer.top_k(batch.read_by(SCORING), self.cut, self.num_top)
        if best is None:
            return None
        ids, log_probs = (batch.per_sampled_token(values) for values in best)
        return Batch(teacher_top_ids=ids, teacher_top_log_probs=log_probs)

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs_at(self, batch: Batch) -> Batch | None:
        """`teacher_log_probs_at`, the log-probs of the tokens in `student_top_ids`."""
        values = self.scorer.log_probs_at(batch, self.cut, STUDENTS_TOP)
        return None if values is None else Batch(teacher_log_probs_at=batch.per_sampled_token(values))

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def hidden_states(self, batch: Batch) -> Batch | None:
        """`teacher_hidden`, what the teacher's head reads of each sampled token."""
        values = self.scorer.hidden_states(batch.read_by(SCORING), self.cut)
        return None if values is None else Batch(teacher_hidden=batch.per_sampled_token(values))


class RewardModel(ScoringRole):
    """A frozen classifier with one label, which scores prompt and response as a whole, or each turn or step.

    It scores in train mode only, because the model may be offloaded during generation.
    """

    def __init__(self, spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role]) -> None:
        """Read the weights. neighbours: the roles of this rank."""
        super().__init__(spec, rank, neighbours)
        tokenizer = rank.folders[rank.config.actor_rollout_ref.model.path].tokenizer
        self._step_ends = tokens_with(tokenizer, spec.settings.step_end)

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def scores(self, batch: Batch) -> Batch | None:
        """`scores`, the head's output at the last token of each row, sampled or not.

        transformers' `...ForSequenceClassification` gives the same to a right-padded row. With `score_at=turns` they
        are sums of `turn_rewards`, the output at the end of each turn and step, and 0 at other sampled tokens.
        """
        if self.spec.settings.score_at == TURN_ENDS:
            ends = ends_of_turns(batch, self._step_ends)
            flat = self.model.pipeline.forward(with_tokens_after(batch, ends), self.cut, values_before)
            if flat is None:
                return None
            parts = torch.zeros(len(ends)).masked_scatter(ends, flat)[batch.flat("sampled")]
            return Batch(scores=sum_rows(parts, batch.num_sampled), turn_rewards=batch.per_sampled_token(parts))
        flat = self.model.pipeline.forward(with_one_more_token(batch), self.cut, values_before)
        return None if flat is None else Batch(scores=flat)


def with_one_more_token(batch: Batch) -> Batch:
    """Return rows in which one token after the last counts as sampled: the value *before* it is the value of the
    sequence, the last one of a row with several conversations.
    """
    rows = [torch.cat([row, row.new_zeros(1)]) for row in batch["input_ids"].unbind()]
    starts = batch.get("conversation_starts")
    if starts is not None:
        starts = ragged([torch.cat([row, row.new_zeros(1)]) for row in starts.unbind()])
    return single_turn(ragged(rows), torch.ones(len(rows), dtype=torch.int64), conversation_starts=starts)


def tokens_with(tokenizer: PreTrainedTokenizerBase, text: str | None) -> torch.Tensor:
    """int64: the tokens whose text has a text within; none for None."""
    ids = [] if text is None else [token for token in range(len(tokenizer)) if text in tokenizer.decode([token])]
    return torch.tensor(ids, dtype=torch.int64)


def ends_of_turns(batch: Batch, step_ends: torch.Tensor) -> torch.Tensor:
    """bool [tokens]: the last token of each turn, and the sampled ones among `step_ends`, int64 ids."""
    sampled, ids = batch.flat("sampled"), batch.flat("input_ids")
    after = torch.cat([sampled[1:], sampled.new_zeros(1)])
    after[conversations(batch)[1].cumsum(0) - 1] = False
    return sampled & (~after | torch.isin(ids, step_ends))


def with_tokens_after(batch: Batch, marked: torch.Tensor) -> Batch:
    """Return rows with one more token at the end of each conversation, in which those that follow the marked ones,
    bool [tokens], alone count as sampled: the value *before* these is the value of what is marked.
    """
    in_row, lengths = conversations(batch)
    place = torch.arange(len(marked)) + torch.arange(len(lengths)).repeat_interleave(lengths)
    size = len(marked) + len(lengths)
    ids, starts, sampled = torch.zeros(size, dtype=torch.int64), *torch.zeros(2, size, dtype=torch.bool)
    ids[place] = batch.flat("input_ids")
    sampled[place[marked] + 1] = True
    longer = row_lengths(batch["input_ids"]) + in_row
    own = None
    if "conversation_starts" in batch:
        starts[place] = batch.flat("conversation_starts")
        own = ragged_from_lengths(starts, longer)
    columns = {"input_ids": ids, "sampled": sampled}
    rows = {name: ragged_from_lengths(values, longer) for name, values in columns.items()}
    return Batch(**rows, conversation_starts=own)


def compared_tokens(rank: Rank, vocab_size: int) -> int:
    """Return over how many tokens student and teacher are compared: those that both have, that is the tokenizer's,
    without the padding of either vocabulary. vocab_size: of the teacher's config.json.
    """
    policy = rank.folders[rank.config.actor_rollout_ref.model.path]
    return min(vocab_size, policy.num_sampled_tokens(rank.config))


def num_compared(config: RunConfig, vocab_size: int) -> int:
    """Return how many of the likeliest tokens a loss over the top-k compares. vocab_size: of the asked model."""
    return min(config.distillation.distillation_loss.topk, vocab_size)
