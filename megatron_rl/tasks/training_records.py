"""Convert examples to the records that roles learn from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron_rl.data.reading import Example, Labelled, Ranking, ScoredExample
from megatron_rl.errors import ConfigError
from megatron_rl.images import Pieces
from megatron_rl.records import Batch, ragged

ONE_MORE = torch.zeros(1, dtype=torch.int64)
"""A token after the last one: the value before it is the score of the whole sequence."""


ScoredTokens = tuple[Tensor, Tensor]
"""A response after its prompt: (tokens int64 [L], bool [L]: True where they are scored)."""


def scored_answer(example: Example) -> ScoredTokens:
    """A response for a reward model, with one token appended: the value before it, the last of all, is the score."""
    tokens = torch.cat([example.tokens, ONE_MORE])
    return tokens, torch.arange(len(tokens)) >= max(example.prompt_length, 1)


def preferred_answer(example: Example) -> ScoredTokens:
    """A response for a policy: the tokens that count are scored."""
    return example.tokens, example.loss_mask


def answer_batch(
    prompts: Sequence[Sequence[ScoredTokens]],
    given: Sequence[Sequence[float]] | None = None,
    labels: Sequence[Sequence[float]] | None = None,
    images: Sequence[Sequence[Pieces]] = (),
) -> Batch:
    """Put the responses to several prompts into one record.

    given, labels: as in `losses.objectives.Answers`; None: 0. images: those of each response.
    """
    zeros = [[0.0] * len(answers) for answers in prompts]
    shown: dict[str, Any] = {}
    if any(pieces for answers in images for pieces in answers):
        shown["images"] = [tuple(chain(*answers)) for answers in images]
        shown["answer_images"] = ragged([torch.tensor([*map(len, answers)]) for answers in images])
    return Batch(
        **shown,
        input_ids=ragged([torch.cat([tokens for tokens, _ in answers]) for answers in prompts]),
        sampled=ragged([torch.cat([scored for _, scored in answers]) for answers in prompts]),
        answer_lengths=ragged([torch.tensor([len(tokens) for tokens, _ in answers]) for answers in prompts]),
        given=ragged([torch.tensor(list(numbers), dtype=torch.float32) for numbers in given or zeros]),
        labels=ragged([torch.tensor(list(numbers), dtype=torch.float32) for numbers in labels or zeros]),
        weights=torch.ones(len(prompts)),
    )


def reward_batch(records: Sequence[Ranking] | Sequence[ScoredExample]) -> Batch:
    """A batch for a reward model: rankings with their margins, or responses with their scores."""
    prompts = [[scored_answer(answer) for answer in answers_of(record)] for record in records]
    given = [[*record.margins, 0.0] if isinstance(record, Ranking) else [record.score] for record in records]
    return answer_batch(prompts, given, images=images_of(records))


def images_of(records: Sequence[Ranking | Labelled | ScoredExample]) -> list[list[Pieces]]:
    """The images of each response of each record."""
    return [[answer.images for answer in answers_of(record)] for record in records]


def answers_of(record: Ranking | Labelled | ScoredExample) -> tuple[Example, ...]:
    """The responses to one prompt, the best first."""
    return record.answers if isinstance(record, Ranking) else (record.example,)


def preference_batch(records: Sequence[Ranking] | Sequence[Labelled]) -> Batch:
    """A batch of preferences for a policy, without the reference's log-probs."""
    prompts = [[preferred_answer(answer) for answer in answers_of(record)] for record in records]
    labels = [[float(isinstance(row, Labelled) and row.desirable)] * len(answers_of(row)) for row in records]
    return answer_batch(prompts, labels=labels, images=images_of(records))


def mismatched(records: Sequence[Labelled], max_length: int) -> list[Labelled]:
    """Pair each prompt with a response to another prompt, cut to `max_length`; kto measures the policy's drift on
    these.

    Depends on the records and their order alone. Where no two prompts are equal, the response is the next record's;
    where no prompt has more than half of the records, each response is taken once. Raises ConfigError if all prompts
    are equal.
    """
    prompts: dict[tuple[bytes, ...], list[int]] = {}
    for number, record in enumerate(records):
        shown = (piece.digest.encode() for piece in record.example.images)
        prompts.setdefault((prompt_of(record.example).numpy().tobytes(), *shown), []).append(number)
    most, count, after = max(map(len, prompts.values()), default=0), len(records), 0
    if most == count > 0:
        raise ConfigError(
            f"{records[0].where}: dpo.loss=kto compares responses to different prompts, and all {count} labelled "
            "responses have the same prompt; try: files with two prompts or more"
        )
    together = [number for group in prompts.values() for number in group]
    pairs = list(records)
    for group in prompts.values():
        after += len(group)
        # Records ordered by prompt, shifted by the size of the largest group, which no group reaches over.
        for place, number in enumerate(group, start=most - len(group)):
            other = together[(after + place % (count - len(group))) % count]
            pairs[number] = _with_answer(records[number], records[other].example, max_length)
    return pairs


def prompt_of(example: Example) -> torch.Tensor:
    """The tokens of the prompt; without one the first token, which is never learned."""
    return example.tokens[: max(example.prompt_length, 1)]


def _with_answer(record: Labelled, answer: Example, max_length: int) -> Labelled:
    """The record's prompt with another response."""
    prompt, start = prompt_of(record.example), max(answer.prompt_length, 1)
    tokens = torch.cat([prompt, answer.tokens[start:]])[:max_length]
    mask = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), answer.loss_mask[start:]])[:max_length]
    example = Example(tokens, mask, record.where, len(prompt), record.example.images)
    return Labelled(example, record.desirable, record.where)
