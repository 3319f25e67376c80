"""Batches for rehearsed passes: rows of the longest length, or of uneven lengths, with made-up columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.columns import COLUMNS
from megatron_rl.config.roles import PassSpec, PoolSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.records import Batch, ragged_from_lengths, single_turn

UNEVEN = (1.0, 0.4, 0.7, 0.25)
"""Lengths of rows as shares of the longest one, in turn."""
MORE_ROUNDS = 1
"""Micro-batches of a rehearsed pass beyond those that fill a pipeline."""


def num_rows(config: RunConfig, pool: PoolSpec, pass_spec: PassSpec, num_samples: int) -> int:
    """Return rows of the longest length of a data-parallel rank: enough to fill the pipeline, at most its share.

    num_samples: of the pass, over all ranks. Activations, and the calls of one micro-batch, are those of the whole pass
    then.
    """
    layout = pool.layout
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size or 1
    cp_size = layout.context_parallel_size
    dp_size = max(1, pool.world_size // (layout.tensor_model_parallel_size * stages * cp_size))
    per_block = pass_spec.num_rows
    if pass_spec.max_tokens is not None:
        longest = (pass_spec.longest or config.longest_sequence) + pass_spec.extra_tokens
        per_block = max(1, pass_spec.max_tokens * cp_size // longest)
    num_blocks = stages + MORE_ROUNDS if chunks == 1 else 2 * stages
    return max(1, min(num_blocks * per_block, -(-num_samples // dp_size)))


def lengths_of(config: RunConfig, num: int, shares: Sequence[float] = (1.0,)) -> list[tuple[int, int]]:
    """Return (prompt, answer) tokens of `num` rows: the longest ones, times the shares in turn."""
    answer, prompt = config.longest_response, config.longest_sequence - config.longest_response
    sizes = [shares[number % len(shares)] for number in range(num)]
    return [(max(1, int(prompt * share)), max(1, int(answer * share))) for share in sizes]


def made_up(lengths: Sequence[tuple[int, int]], columns: Sequence[str]) -> Batch:
    """Return rows of (prompt, answer) tokens with these columns of sampled tokens, which are zeros."""
    totals = torch.tensor([prompt + answer for prompt, answer in lengths])
    answers = torch.tensor([answer for _, answer in lengths])
    input_ids = ragged_from_lengths(torch.arange(int(totals.sum())) % 1000, totals)
    batch = single_turn(input_ids, answers)
    for name in columns:
        assert COLUMNS[name].shape == "sampled token"
        batch.add(**{name: batch.per_sampled_token(torch.zeros(int(answers.sum())))})
    return batch
