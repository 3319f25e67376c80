"""Typed records that travel between stages. Shapes live here.

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


def to_padded(batch: torch.Tensor, length: int, padding: float = 0) -> torch.Tensor:
    """Dense `[B, length]` copy of a ragged tensor, right-padded with `padding`; rows must not exceed `length`."""
    lengths = row_lengths(batch)
    dense = torch.full((lengths.numel(), length), padding, dtype=batch.dtype)
    dense[torch.arange(length)[None] < lengths[:, None]] = batch.values()
    return dense


def from_padded(dense: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Ragged `[B, (N)]` copy of the first `lengths[b]` columns of each row of `dense [B, N]`."""
    mask = torch.arange(dense.shape[1])[None] < lengths[:, None]
    return ragged_from_lengths(dense[mask], lengths)


def no_responses(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(zero response lengths [B], empty float32 ragged field [B, (0)]) for rows that must not count."""
    lengths = torch.zeros(num_rows, dtype=torch.int64)
    return lengths, ragged_from_lengths(torch.empty(0), lengths)


def known(field: torch.Tensor | None) -> torch.Tensor:
    """A field that the loop must have filled by now. Raises ValueError where it is None."""
    if field is None:
        raise ValueError("a field of this record is needed before it was computed")
    return field


Conversation = str | list[dict[str, Any]]
"""A prompt as its file has it: text, or messages with role and content."""


class Prompts(TensorClass):
    """Questions of one step, as tokens, with what the reward function will be told about them.

    index: int64 [B], row number in the dataset; names the prompt in seeds and sample tables.
    sample: int64 [B], which of the `rollout.n` samples of that prompt this row is.
    prompt_ids: int64 [B, (P)].
    data_source, ground_truth, extra_info: non-tensor, one per row (str, str, dict).
    uid: int64 [B], the same for the samples that are compared with each other; None before `repeat`.
    raw_prompt: non-tensor, one `Conversation` per row, where a reward model reads text; else None.
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
        """Each row `num_samples` times, samples of one row adjacent, `sample` counting all samples of a prompt from 0.

        A prompt that the batch holds twice (where it straddles two epochs) goes on counting, so no two samples share
        a seed, and makes two groups, as every row here makes one: `uid` is the row's number.
        """
        rows = torch.arange(len(self)).repeat_interleave(num_samples)
        repeated = self[rows]
        repeated.uid = rows
        seen: Counter[int] = Counter()
        for row, index in enumerate(repeated.index.tolist()):
            repeated.sample[row] = seen[index]
            seen[index] += 1
        return repeated

    def one_per_group(self) -> Prompts:
        """The first row of each group, in the order of `uid`."""
        _, group = known(self.uid).unique(return_inverse=True)
        rows = torch.arange(len(self))
        first = torch.full((int(group.max()) + 1,), len(self)).scatter_reduce(0, group, rows, "amin")
        return self[first]


@dataclass(frozen=True)
class Sampling:
    """How to draw responses: temperature 0 is greedy; `max_tokens` counts the end token.

    `salt` enters every request's seed and tells one batch from the next.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    salt: int


class Generations(TensorClass):
    """What the rollout engine returns for B prompts.

    response_ids: int64 [B, (R)], with the end-of-sequence token when the model produced one.
    rollout_log_probs: float32 [B, (R)], the engine's own log-probability of each sampled token.
    truncated: bool [B], the response hit `max_response_length` before its end.
    versions: int64 [B, (R)], of the weights that drew each token, in training steps; None where all are the newest.
    routed_experts: uint8 or int16 [B, (T), layers, K], the K experts of every layer that has experts to which the
    engine has sent each of the T = L - 1 tokens that it has read, all but the last; None where it does not say.
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

    sum_pi_squared: float32 [B, (R)], of every token's distribution the sum of squared probabilities, where the
    estimator needs it; else None.
    routed_experts: uint8 or int16 [B, (L), layers, K], the experts of every token, where they are recorded; else None.
    num_other_experts: int64 [B], how many of the experts that the scored record names for a row the routers would not
    have chosen; None where it names none.
    """

    scores: torch.Tensor
    sum_pi_squared: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    num_other_experts: torch.Tensor | None = None


class SequenceScores(TensorClass):
    """One float per row, from a model role: scores float32 [B]."""

    scores: torch.Tensor


class AnswerScores(TensorClass):
    """One float per answer, of rows as in `AnswerBatch`: scores float32 [G, (n)]."""

    scores: torch.Tensor


class ActorBatch(TensorClass):
    """What one policy update reads. Ragged response fields are float32 [B, (R)]; see `Sequences` for the tokens.

    old_log_probs: None where they are the update's own. ref_log_probs: where a KL to the reference enters the loss.
    rollout_weights: importance weights of the tokens, and
    kept: 1 for those that count, where the rollout's samples are corrected. Else None.
    routed_experts: as of `Sequences`; the update sends each token to these experts.
    """

    input_ids: torch.Tensor
    response_lengths: torch.Tensor
    old_log_probs: torch.Tensor | None
    advantages: torch.Tensor
    ref_log_probs: torch.Tensor | None = None
    rollout_weights: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None

    def neutral(self) -> ActorBatch:
        """The same rows with empty responses: they fill up a split and contribute nothing to a loss."""
        zero, empty = no_responses(len(self))
        old, *others = (
            None if field is None else empty
            for field in (self.old_log_probs, self.ref_log_probs, self.rollout_weights, self.kept)
        )
        return ActorBatch(self.input_ids, zero, old, empty, *others, batch_size=self.batch_size)


class CriticBatch(TensorClass):
    """What one value update reads. Ragged response fields are float32 [B, (R)]; see `Sequences` for the tokens.

    kept: as of `ActorBatch`.
    """

    input_ids: torch.Tensor
    response_lengths: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor
    kept: torch.Tensor | None = None

    def neutral(self) -> CriticBatch:
        """The same rows with empty responses: they fill up a split and contribute nothing to a loss."""
        zero, empty = no_responses(len(self))
        kept = None if self.kept is None else empty
        return CriticBatch(self.input_ids, zero, empty, empty, kept, batch_size=self.batch_size)


class TokenBatch(TensorClass):
    """What an update by cross-entropy reads: see `Sequences`; here the response is everything from the first token that
    counts on. kept: float32 [B, (R)], 1 for those that count."""

    input_ids: torch.Tensor
    response_lengths: torch.Tensor
    kept: torch.Tensor

    def neutral(self) -> TokenBatch:
        """The same rows with empty responses: they fill up a split and contribute nothing to a loss."""
        return TokenBatch(self.input_ids, *no_responses(len(self)), batch_size=self.batch_size)

    def sequences(self) -> Sequences:
        """The token rows alone."""
        return Sequences(self.input_ids, self.response_lengths, batch_size=self.batch_size)


class AnswerBatch(TensorClass):
    """Answers that are compared with each other, one prompt's to a row, so that no split parts them.

    G prompts, of which each has n answers: whole sequences of L tokens, prompt first, which lie end to end in
    input_ids: int64 [G, (T)]. lengths, response_lengths: int64 [G, (n)], of each sequence, and of what is scored at its
    end. kept: float32 [G, (R)], 1 where a scored token counts. given, labels: float32 [G, (n)], what the loss is told
    of each answer beside its tokens (`losses.objectives`). weights: float32 [G], 0 for a row that fills up a split.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    response_lengths: torch.Tensor
    kept: torch.Tensor
    given: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    def neutral(self) -> AnswerBatch:
        """The same rows, none of which counts."""
        found = self.clone()
        found.weights = torch.zeros_like(self.weights)
        return found

    @property
    def sizes(self) -> torch.Tensor:
        """int64 [G]: answers of each prompt."""
        return row_lengths(self.lengths)

    def rows(self) -> TokenBatch:
        """One answer to a row, prompt after prompt."""
        lengths = self.response_lengths.values()
        return TokenBatch(
            ragged_from_lengths(self.input_ids.values(), self.lengths.values()),
            lengths,
            ragged_from_lengths(self.kept.values(), lengths),
            batch_size=[len(lengths)],
        )


class Experience(TensorClass):
    """Everything the loop knows about one step's samples; fields are filled as it computes them, None until then.

    input_ids int64 [B, (L)], response_lengths int64 [B], groups int64 [B] (equal for the samples of one prompt);
    truncated: bool [B], as of `Generations`;
    scores, greedy_scores: float32 [B], the task reward, and that of the greedy answer to the same prompt;
    components: float32 [B, K], numbers of the reward function that are normalised apart;
    versions int64 [B, (R)], of the weights that drew each token; None where all are the newest;
    routed_experts, as of `Sequences`: the engine's, or with R2 those of the pass for old log-probs;
    rollout_log_probs, old_log_probs, sum_pi_squared, ref_log_probs, old_values, rewards, advantages, returns,
    rollout_weights, kept: float32 [B, (R)].
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

    def sequences(self, with_experts: bool = False) -> Sequences:
        """The token rows alone, for a role that scores them; with the experts of their tokens if told."""
        experts = self.routed_experts if with_experts else None
        return Sequences(self.input_ids, self.response_lengths, experts, batch_size=self.batch_size)

    def actor_batch(self, with_reference: bool = False, with_experts: bool = False) -> ActorBatch:
        """The fields a policy update reads; needs `advantages`, and `ref_log_probs` if told."""
        return ActorBatch(
            self.input_ids,
            self.response_lengths,
            self.old_log_probs,
            known(self.advantages),
            self.ref_log_probs if with_reference else None,
            self.rollout_weights,
            self.kept,
            self.routed_experts if with_experts else None,
            batch_size=self.batch_size,
        )

    def critic_batch(self) -> CriticBatch:
        """The fields a value update reads; needs `old_values` and `returns`."""
        fields = known(self.old_values), known(self.returns), self.kept
        return CriticBatch(self.input_ids, self.response_lengths, *fields, batch_size=self.batch_size)


Record = TypeVar("Record", bound=TensorClass)


def concatenate(records: Sequence[Record]) -> Record:
    """The rows of several records of one class, one after the other."""
    parts: Any = records  # torch types no more than tensors here; tensordict joins its classes
    return cast(Record, torch.cat(parts))


TokenRows = Sequences | ActorBatch | CriticBatch | TokenBatch
"""Records with `input_ids` and `response_lengths`: what a model role reads."""


@dataclass(frozen=True)
class RoleState:
    """What a checkpoint says of a trained role beside its tensors; the same on all ranks.

    num_updates: optimizer steps taken, which is where the learning-rate schedule stands. adam_step: what Adam corrects
    its moments' bias by. loss_scale: what the loss is multiplied with in float16, a power of two; 0: it is not scaled.
    good_steps: updates since the scale last changed.
    """

    num_updates: int
    adam_step: int
    loss_scale: int = 0
    good_steps: int = 0


def non_tensor(values: Sequence[Any]) -> NonTensorStack:
    """Wrap one Python object per row so that it slices with the record."""
    return NonTensorStack(*values)
