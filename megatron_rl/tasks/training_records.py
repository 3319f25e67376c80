"""Convert examples to the records that roles learn from. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.data.examples import Example, Labelled, Ranking, ScoredExample
from megatron_rl.records import Batch, ragged

ONE_MORE = torch.zeros(1, dtype=torch.int64)
"""A token after the last one: the value before it is the score of the whole sequence."""


ScoredTokens = tuple[Tensor, Tensor]
"""An answer after its prompt: (tokens int64 [L], bool [L]: True where they are scored)."""


def scored_answer(example: Example) -> ScoredTokens:
    """An answer for a reward model, with one token appended: the value before it, the last of all, is the score."""
    tokens = torch.cat([example.tokens, ONE_MORE])
    return tokens, torch.arange(len(tokens)) >= max(example.prompt_length, 1)


def preferred_answer(example: Example) -> ScoredTokens:
    """An answer for a policy: the tokens that count are scored."""
    return example.tokens, example.loss_mask


def answer_batch(
    prompts: Sequence[Sequence[ScoredTokens]],
    given: Sequence[Sequence[float]] | None = None,
    labels: Sequence[Sequence[float]] | None = None,
) -> Batch:
    """Put the answers to several prompts into one record.

    given, labels: as in `losses.objectives.Answers`; None: 0.
    """
    zeros = [[0.0] * len(answers) for answers in prompts]
    return Batch(
        input_ids=ragged([torch.cat([tokens for tokens, _ in answers]) for answers in prompts]),
        sampled=ragged([torch.cat([scored for _, scored in answers]) for answers in prompts]),
        answer_lengths=ragged([torch.tensor([len(tokens) for tokens, _ in answers]) for answers in prompts]),
        given=ragged([torch.tensor(list(numbers), dtype=torch.float32) for numbers in given or zeros]),
        labels=ragged([torch.tensor(list(numbers), dtype=torch.float32) for numbers in labels or zeros]),
        weights=torch.ones(len(prompts)),
    )


def reward_batch(records: Sequence[Ranking] | Sequence[ScoredExample]) -> Batch:
    """A batch for a reward model: rankings with their margins, or answers with their scores."""
    prompts, given = [], []
    for record in records:
        if isinstance(record, Ranking):
            prompts.append([scored_answer(answer) for answer in record.answers])
            given.append([*record.margins, 0.0])
        else:
            prompts.append([scored_answer(record.example)])
            given.append([record.score])
    return answer_batch(prompts, given)


def answers_of(record: Ranking | Labelled) -> tuple[Example, ...]:
    """The answers to one prompt, the best first."""
    return record.answers if isinstance(record, Ranking) else (record.example,)


def preference_batch(records: Sequence[Ranking] | Sequence[Labelled]) -> Batch:
    """A batch of preferences for a policy, without the reference's log-probs."""
    prompts = [[preferred_answer(answer) for answer in answers_of(record)] for record in records]
    labels = [[float(isinstance(row, Labelled) and row.desirable)] * len(answers_of(row)) for row in records]
    return answer_batch(prompts, labels=labels)


def mismatched(records: Sequence[Labelled], max_length: int) -> list[Labelled]:
    """Pair each prompt with the next record's answer, cut to `max_length`; kto measures the policy's drift on these."""
    pairs = []
    for record, other in zip(records, [*records[1:], *records[:1]], strict=True):
        prompt, answer = record.example, other.example
        first, start = max(prompt.prompt_length, 1), max(answer.prompt_length, 1)
        tokens = torch.cat([prompt.tokens[:first], answer.tokens[start:]])[:max_length]
        mask = torch.cat([torch.zeros(first, dtype=torch.bool), answer.loss_mask[start:]])[:max_length]
        pairs.append(Labelled(Example(tokens, mask, record.where, first), record.desirable, record.where))
    return pairs
