"""Answers to prompts that are not theirs, on which KTO estimates the KL between policy and reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.supervised.records import Example, Labelled


def mismatched(batch: Sequence[Labelled], max_length: int) -> list[Example]:
    """The prompt of each example of a batch with the answer of the next one; the last takes the first one's.

    All tokens of the answers count that count in theirs; what is longer than `max_length` loses its end. A batch of one
    gives its own answer back, and with it a KL of what was learned from it. Where examples stand is the prompts'.
    """
    made = []
    for number, labelled in enumerate(batch):
        own, other = labelled.example, batch[(number + 1) % len(batch)].example
        tokens = torch.cat([own.tokens[: own.prompt_length], other.tokens[other.prompt_length :]])[:max_length]
        before = torch.zeros(own.prompt_length, dtype=torch.bool)
        mask = torch.cat([before, other.loss_mask[other.prompt_length :]])[:max_length]
        mask[0] = False
        made.append(Example(tokens, mask, own.where, min(own.prompt_length, max_length)))
    return made
