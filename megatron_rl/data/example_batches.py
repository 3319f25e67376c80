"""From examples to the record that cross-entropy is computed of. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.data.examples import Example
from megatron_rl.records import TokenBatch, ragged


def token_batch(examples: Sequence[Example]) -> TokenBatch:
    """Of each example the tokens up to the last that counts. Raises ValueError where one has none that counts."""
    rows, responses, kept = [], [], []
    for example in examples:
        counted = example.loss_mask.nonzero()[:, 0]
        if not len(counted):
            raise ValueError(f"{example.where}: no token counts in the loss")
        first, end = int(counted[0]), int(counted[-1]) + 1
        rows.append(example.tokens[:end])
        responses.append(end - first)
        kept.append(example.loss_mask[first:end].float())
    return TokenBatch(ragged(rows), torch.tensor(responses), ragged(kept), batch_size=[len(rows)])
