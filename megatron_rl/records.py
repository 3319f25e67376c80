"""Typed records that roles and the controller exchange, with their shapes.

Legend: B rows (samples), P prompt tokens, R response tokens, L = P + R.
`[B, (R)]` is a ragged tensor: `torch.nested` in jagged layout, one row per sample, nothing padded.
Every record slices, indexes, splits and concatenates along B (it is a tensordict `TensorClass`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from tensordict import NonTensorStack, TensorClass


def ragged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack B one-dimensional tensors (any lengths, same dtype) into one ragged `[B, (N)]` tensor without padding."""
    if not rows:
        raise ValueError("ragged() needs at least one row; slice an existing record to get an empty one")
    values = torch.cat(list(rows))
    lengths = torch.tensor([row.numel() for row in rows])
    return ragged_from_lengths(values, lengths)


def ragged_from_lengths(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """View flat `values [sum(lengths)]` as a ragged `[B, (N)]` tensor; `lengths [B]` int64."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def row_lengths(batch: torch.Tensor) -> torch.Tensor:
    """Lengths `[B]` (int64) of the rows of a ragged tensor."""
    nested: Any = batch  # torch types no jagged layout
    lengths: torch.Tensor = nested.offsets().diff()
    return lengths


def to_padded(batch: torch.Tensor, length: int) -> torch.Tensor:
    """Dense `[B, length]` copy of a ragged tensor, right-padded with zeros; rows must not exceed `length`."""
    lengths = row_lengths(batch)
    dense = torch.zeros((lengths.numel(), length), dtype=batch.dtype)
    dense[torch.arange(length)[None] < lengths[:, None]] = batch.values()
    return dense


def no_responses(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(zero response lengths [B], empty float32 ragged field [B, (0)]) for rows that do not count."""
    lengths = torch.zeros(num_rows, dtype=torch.int64)
    return lengths, ragged_from_lengths(torch.empty(0), lengths)


def known(field: torch.Tensor | None) -> torch.Tensor:
    """A field that must be filled. Raises ValueError if it is None."""
    if field is None:
        raise ValueError("a field of this record is needed before it was computed")
    return field


Conversation = str | list[dict[str, Any]]
"""A prompt in the form of its file: text, or messages with role and content."""


class Prompts(TensorClass):
    """The prompts of one step, as tokens, with the arguments of the reward function.

    index: int64 [B], row number in the dataset; identifies the prompt in seeds and sample tables.
    sample: int64 [B], the number of this row among the `rollout.n` samples of its prompt.
    prompt_ids: int64 [B, (P)].
    data_source, ground_truth, extra_info: non-tensor, one per row (str, str, dict).
    uid: int64 [B], equal for the samples of a group, which are compared with each other; None before `repeat`.
    raw_prompt: non-tensor, one `Conversation` per row, if a reward model reads text; else None.
    """

    index: torch.Tensor
    sample: torch.Tensor
    prompt_ids: torch.Tensor
    data_source: list[str]
    ground_truth: list[Any]
    extra_info: list[dict[str, Any]]
    uid: torch.Tensor | None = None
    raw_prompt: list[Conversation] | None = None

    def repeat(self, num_samples: int) -> Prompts:  # type: ignore[override]  # a tensor's takes a number for each dim
        """Each row `num_samples` times; samples of one row are adjacent, and `sample` counts a prompt's samples from 0.

        If a prompt is in the batch twice (at the border of two epochs), `sample` continues counting, so that no two
        samples share a seed. Every row here makes one group, so such a prompt has two: `uid` is the row's number.
        """
        rows = torch.arange(len(self)).repeat_interleave(num_samples)
        repeated = self[rows]
        repeated.uid = rows
        num_samples_of: Counter[int] = Counter()
        for row, index in enumerate(repeated.index.tolist()):
            repeated.sample[row] = num_samples_of[index]
            num_samples_of[index] += 1
        return repeated

    def one_per_group(self) -> Prompts:
        """The first row of each group, in the order of `uid`."""
        _, group = known(self.uid).unique(return_inverse=True)
        rows = torch.arange(len(self))
        first = torch.full((int(group.max()) + 1,), len(self)).scatter_reduce(0, group, rows, "amin")
        return self[first]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: temperature 0 is greedy; `max_tokens` counts the end token.

    salt: a part of every request's seed that differs between batches.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    salt: int


class Generations(TensorClass):
    """The rollout engine's answers to B prompts.

    response_ids: int64 [B, (R)], with the end-of-sequence token when the model produced one.
    rollout_log_probs: float32 [B, (R)], the engine's own log-probability of each sampled token.
    truncated: bool [B], the response reached `max_response_length` before its end.
    versions: int64 [B, (R)], the weights that drew each token, in training steps; None if all are the newest.
    routed_experts: uint8 or int16 [B, (T), layers, K], the K experts of each token in every layer that has experts. The
    T = L - 1 tokens are those that the engine has read, all but the last. None if the engine does not return them.
    """

    response_ids: torch.Tensor
    rollout_log_probs: torch.Tensor
    truncated: torch.Tensor
    versions: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None


class Sequences(TensorClass):
    """Token rows to score: input_ids int64 [B, (L)] = prompt then response; response_lengths int64 [B].

    routed_experts: uint8 or int16 [B, (T), layers, K], the experts of the first T <= L tokens of each row, or None.
    """

    input_ids: torch.Tensor
    response_lengths: torch.Tensor
    routed_experts: torch.Tensor | None = None


class TokenScores(TensorClass):
    """One float per response token, from a model role: scores float32 [B, (R)].

    sum_pi_squared: float32 [B, (R)], the sum of squared probabilities of every token's distribution, if the estimator
    needs it; else None. entropy: float32 [B, (R)], of these distributions, if the policy loss chooses tokens by it.
    routed_experts: uint8 or int16 [B, (L), layers, K], the experts of every token, if they are recorded; else None.
    num_other_experts: int64 [B], how many of a row's recorded experts the routers would not have chosen; None without
    recorded experts.
    """

    scores: torch.Tensor
    sum_pi_squared: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    num_other_experts: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


class SequenceScores(TensorClass):
    """One float per row, from a model role: scores float32 [B]."""

    scores: torch.Tensor


class AnswerScores(TensorClass):
    """One float per answer, with the rows of `AnswerBatch`: scores float32 [G, (n)]."""

    scores: torch.Tensor


class ActorBatch(TensorClass):
    """The input of one policy update. Ragged response fields are float32 [B, (R)]; see `Sequences` for the tokens.

    old_log_probs: None if the update computes them itself. ref_log_probs: if the loss has a KL to the reference, else
    None. rollout_weights: importance weights of the tokens; kept: 1 for tokens that count; both None without rollout
    correction. routed_experts: see `Sequences`; the update sends each token to these experts. trained: 1 for tokens
    that the policy loss trains; KL, entropy bonus and denominators have all tokens that count; None: all.
    """

    input_ids: torch.Tensor
    response_lengths: torch.Tensor
    old_log_probs: torch.Tensor | None
    advantages: torch.Tensor
    ref_log_probs: torch.Tensor | None = None
    rollout_weights: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    trained: torch.Tensor | None = None

    def neutral(self) -> ActorBatch:
        """A copy with empty responses, which fills up a split and adds nothing to a loss."""
        zero, empty = no_responses(len(self))
        fields = (self.old_log_probs, self.ref_log_probs, self.rollout_weights, self.kept, None, self.trained)
        old, *others = (None if field is None else empty for field in fields)
        return ActorBatch(self.input_ids, zero, old, empty, *others, batch_size=self.batch_size)


class CriticBatch(TensorClass):
    """The input of one value update. Ragged response fields are float32 [B, (R)]; see `Sequences` for the tokens.

    kept: see `ActorBatch`.
    """

    input_ids: torch.Tensor
    response_lengths: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor
    kept: torch.Tensor | None = None

    def neutral(self) -> CriticBatch:
        """A copy with empty responses, which fills up a split and adds nothing to a loss."""
        zero, empty = no_responses(len(self))
        kept = None if self.kept is None else empty
        return CriticBatch(self.input_ids, zero, empty, empty, kept, batch_size=self.batch_size)


class TokenBatch(TensorClass):
    """The input of a cross-entropy update: see `Sequences`. The response begins with the first token that counts.

    kept: float32 [B, (R)], 1 for tokens that count.
    """

    input_ids: torch.Tensor
    response_lengths: torch.Tensor
    kept: torch.Tensor

    def neutral(self) -> TokenBatch:
        """A copy with empty responses, which fills up a split and adds nothing to a loss."""
        return TokenBatch(self.input_ids, *no_responses(len(self)), batch_size=self.batch_size)

    def sequences(self) -> Sequences:
        """The token rows alone."""
        return Sequences(self.input_ids, self.response_lengths, batch_size=self.batch_size)


class AnswerBatch(TensorClass):
    """Answers that are compared with each other. A row has all answers to one prompt, so that no split separates them.

    G prompts with n answers each. input_ids: int64 [G, (T)], the whole sequences, prompt first, end to end. lengths,
    response_lengths: int64 [G, (n)], of each sequence and of its scored end. kept: float32 [G, (R)], 1 for scored
    tokens that count. given, labels: float32 [G, (n)], arguments of the loss for each answer (`losses.objectives`).
    weights: float32 [G], 0 for a row that fills up a split.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    response_lengths: torch.Tensor
    kept: torch.Tensor
    given: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    def neutral(self) -> AnswerBatch:
        """A copy whose rows do not count."""
        neutral = self.clone()
        neutral.weights = torch.zeros_like(self.weights)
        return neutral

    @property
    def sizes(self) -> torch.Tensor:
        """int64 [G]: number of answers of each prompt."""
        return row_lengths(self.lengths)

    def rows(self) -> TokenBatch:
        """The answers as one row each, prompt after prompt."""
        lengths = self.response_lengths.values()
        return TokenBatch(
            ragged_from_lengths(self.input_ids.values(), self.lengths.values()),
            lengths,
            ragged_from_lengths(self.kept.values(), lengths),
            batch_size=[len(lengths)],
        )


class Experience(TensorClass):
    """All data of one step's samples. The loop fills fields as it computes them; they are None until then.

    input_ids int64 [B, (L)], response_lengths int64 [B], groups int64 [B] (equal for the samples of one prompt);
    truncated: bool [B], as of `Generations`;
    scores, greedy_scores: float32 [B], the task reward, and that of the greedy answer to the same prompt;
    components: float32 [B, K], values of the reward function that are normalised separately;
    versions int64 [B, (R)], the weights that drew each token; None if all are the newest;
    routed_experts (see `Sequences`): those of the engine, or with R2 those of the pass for old log-probs;
    rollout_log_probs, old_log_probs, sum_pi_squared, ref_log_probs, old_values, rewards, advantages, returns,
    rollout_weights, kept, trained: float32 [B, (R)].
    """

    input_ids: torch.Tensor
    response_lengths: torch.Tensor
    rollout_log_probs: torch.Tensor
    versions: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    truncated: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    greedy_scores: torch.Tensor | None = None
    components: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None
    ref_log_probs: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    rollout_weights: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    trained: torch.Tensor | None = None

    def sequences(self, with_experts: bool = False) -> Sequences:
        """The token rows for a role that scores them, with the experts of their tokens if `with_experts`."""
        experts = self.routed_experts if with_experts else None
        return Sequences(self.input_ids, self.response_lengths, experts, batch_size=self.batch_size)

    def actor_batch(self, with_reference: bool = False, with_experts: bool = False) -> ActorBatch:
        """The input of a policy update; needs `advantages`, and `ref_log_probs` if `with_reference`."""
        return ActorBatch(
            self.input_ids,
            self.response_lengths,
            self.old_log_probs,
            known(self.advantages),
            self.ref_log_probs if with_reference else None,
            self.rollout_weights,
            self.kept,
            self.routed_experts if with_experts else None,
            self.trained,
            batch_size=self.batch_size,
        )

    def critic_batch(self) -> CriticBatch:
        """The input of a value update; needs `old_values` and `returns`."""
        fields = known(self.old_values), known(self.returns), self.kept
        return CriticBatch(self.input_ids, self.response_lengths, *fields, batch_size=self.batch_size)


Record = TypeVar("Record", bound=TensorClass)


def concatenate(records: Sequence[Record]) -> Record:
    """The rows of several records of one class, one after the other."""
    parts: Any = records  # torch types no more than tensors here; tensordict joins its classes
    return cast(Record, torch.cat(parts))


TokenRows = Sequences | ActorBatch | CriticBatch | TokenBatch
"""Records with `input_ids` and `response_lengths`, which model roles read."""


@dataclass(frozen=True)
class RoleState:
    """The state of a trained role in a checkpoint beside its tensors; equal on all ranks.

    num_updates: number of optimizer steps, the position in the learning-rate schedule. adam_step: the step of Adam's
    bias correction. loss_scale: factor of the loss in float16, a power of two; 0: it is not scaled. good_steps: number
    of updates since the scale last changed.
    """

    num_updates: int
    adam_step: int
    loss_scale: int = 0
    good_steps: int = 0


def non_tensor(values: Sequence[Any]) -> NonTensorStack:
    """Wrap one Python object per row so that it slices with the record."""
    return NonTensorStack(*values)
