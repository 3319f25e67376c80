"""Batches for rehearsed passes: rows of the longest length, or of uneven lengths, with made-up columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.columns import COLUMNS
from megatron_rl.config.algorithms import distillation_reads
from megatron_rl.config.roles import PassSpec, Placement, PoolSpec, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.records import Batch, ragged_from_lengths, single_turn

UNEVEN = (1.0, 0.4, 0.7, 0.25)
"""Lengths of rows as shares of the longest one, in turn."""
ANSWERS = 2
"""Responses to a prompt, where a loss compares them."""
MORE_ROUNDS = 1
"""Micro-batches of a rehearsed pass beyond those that fill a pipeline."""


def num_rows(config: RunConfig, pool: PoolSpec, pass_spec: PassSpec, num_samples: int) -> int:
    """Return rows of the longest length of a data-parallel rank: enough to fill the pipeline, at most its share.

    num_samples: of the pass, over all ranks. Activations, and the calls of one micro-batch, are those of the whole pass
    then. Ranks that choose who shares a pass all have the rows of all of them.
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
    num_groups = dp_size if layout.dynamic_context_parallel and cp_size > 1 else 1
    return num_groups * max(1, min(num_blocks * per_block, -(-num_samples // dp_size)))


def lengths_of(
    config: RunConfig, pass_spec: PassSpec, num: int, shares: Sequence[float] = (1.0,)
) -> list[tuple[int, int]]:
    """Return (prompt, response) tokens of `num` rows: the longest ones, times the shares in turn."""
    answer = config.longest_response if pass_spec.scored is None else pass_spec.scored
    prompt = (config.longest_sequence if pass_spec.longest is None else pass_spec.longest) - answer
    sizes = [shares[number % len(shares)] for number in range(num)]
    return [(max(1, int(prompt * share)), max(1, int(answer * share))) for share in sizes]


def of_teachers(config: RunConfig) -> dict[str, torch.Tensor]:
    """Return the columns by which the actor learns from teachers, for one token: name -> zeros [1] or [1, numbers]."""
    reads, teachers = distillation_reads(config), Placement.of(config).teachers
    if not reads:
        return {}
    columns = {"teachers": torch.zeros(1, dtype=torch.int64)}
    for name in reads:
        if name == "teacher_log_probs":
            columns[name] = torch.zeros(1)
        elif name == "teacher_hidden":
            width = max(ModelFolder(role.model_path).settings["hidden_size"] for role in teachers)
            columns[name] = torch.zeros(1, width, dtype=getattr(torch, teachers[0].megatron.dtype))
        else:
            sizes = [ModelFolder(role.model_path).settings["vocab_size"] for role in teachers]
            width = min(config.distillation.distillation_loss.topk, *sizes)
            columns[name] = torch.zeros(1, width, dtype=torch.int32 if name.endswith("_ids") else torch.float32)
    return columns


def synthetic_batch(
    lengths: Sequence[tuple[int, int]],
    vocab_size: int,
    columns: Sequence[str],
    others: Mapping[str, torch.Tensor] | None = None,
) -> Batch:
    """Return rows of (prompt, response) tokens with these columns of sampled tokens, which are zeros.

    others: further columns, name -> the value of every token.
    """
    totals = torch.tensor([prompt + answer for prompt, answer in lengths])
    answers = torch.tensor([answer for _, answer in lengths])
    numbers = torch.arange(int(totals.sum()))
    # Squares, so that no two prompts are the same where there are few tokens.
    input_ids = ragged_from_lengths((numbers * numbers // 3) % min(1000, vocab_size), totals)
    batch = single_turn(input_ids, answers)
    for name in columns:
        assert COLUMNS[name].shape == "sampled token"
        batch.add(**{name: batch.per_sampled_token(torch.zeros(int(answers.sum())))})
    for name, value in (others or {}).items():
        whole = value.new_zeros(int(answers.sum()), *value.shape[1:])
        batch.add(**{name: batch.per_sampled_token(whole)})
    return batch


def vocabulary_of(role: RoleSpec) -> int:
    """Return the number of tokens that a role's model has."""
    size: int = ModelFolder(role.model_path).settings["vocab_size"]
    return size


def half_as_long(config: RunConfig, pass_spec: PassSpec) -> PassSpec:
    """Return the pass for pairs: the responses to a prompt share a micro-batch."""
    longest = config.longest_sequence if pass_spec.longest is None else pass_spec.longest
    scored = config.longest_response if pass_spec.scored is None else pass_spec.scored
    return replace(pass_spec, longest=longest // ANSWERS, scored=scored // ANSWERS)


def synthetic_pairs(lengths: Sequence[tuple[int, int]], vocab_size: int) -> Batch:
    """Return a batch of responses that a loss compares: of each (prompt, response) tokens two, as responses to one
    prompt."""
    answers = synthetic_batch([one for one in lengths for _ in range(ANSWERS)], vocab_size, ())
    sizes = torch.tensor([prompt + answer for prompt, answer in lengths])
    two = torch.full((len(lengths),), ANSWERS)
    flat = {name: ragged_from_lengths(answers.flat(name), ANSWERS * sizes) for name in ("input_ids", "sampled")}
    zeros = ragged_from_lengths(torch.zeros(ANSWERS * len(lengths)), two)
    of_answers = ragged_from_lengths(sizes.repeat_interleave(ANSWERS), two)
    return Batch(**flat, answer_lengths=of_answers, given=zeros, labels=zeros, weights=torch.ones(len(lengths)))
