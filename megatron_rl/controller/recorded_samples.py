"""Record samples of a step with every number that the step computed of their tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from megatron_rl.columns import PROMPT_COLUMNS
from megatron_rl.config.algorithms import policy_agg_mode
from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.run_logger import RunLogger, prompt_texts
from megatron_rl.images import numbers_of_pieces
from megatron_rl.losses.aggregate import BatchTotals, counted, token_weights
from megatron_rl.observe.sample_files import GREEDY, SAMPLES_FOLDER, Column, RecordedStep, write_step
from megatron_rl.records import Batch, elements_of, prompts_of, row_lengths
from megatron_rl.scoring.sampled_batch import SampledBatch

LOSS_TERMS = "loss_terms"


def record_samples(logger: RunLogger, batch: SampledBatch) -> None:
    """Write the samples of the first `trainer.recorded_prompts` prompts of a step; warns where that fails."""
    number = logger.config.trainer.recorded_prompts
    if number:
        try:
            write_step(logger.folder.path / SAMPLES_FOLDER, recorded_step(logger, batch, number))
        except OSError as error:
            logger.warn(f"{logger.folder.path} is missing the recorded samples of step {batch.step}: {error}")


def recorded_step(logger: RunLogger, batch: SampledBatch, number: int) -> RecordedStep:
    """Return the samples of the first `number` prompts, -1: of all, once the step has updated."""
    chosen = first_prompts(batch.rows["uid"], number)
    terms, sampled = loss_terms(batch.rows, logger.config), batch.rows.num_sampled
    prompts, scored = prompts_of(batch.rows)[chosen], batch.all_scored[chosen]
    columns = {LOSS_TERMS: terms[elements_of(chosen, sampled)].numpy()}
    lengths = {LOSS_TERMS: sampled[chosen].numpy()}
    greedy = batch.greedy if len(chosen) == len(batch.rows) else None
    for prefix, part, numbers in (("", batch.rows, chosen), (GREEDY, greedy, None)):
        for name, values, sizes in () if part is None else recorded_columns(part, numbers):
            columns[prefix + name] = values
            if sizes is not None:
                lengths[prefix + name] = sizes
    table = logger.with_images(prompts, scored.table(prompt_texts(logger.tokenizer, prompts), batch.step))
    places = zip(prompts["index"].tolist(), prompts["sample"].tolist(), strict=True)
    texts = token_texts(logger, columns["input_ids"], lengths["input_ids"])
    for row, (index, sample), tokens in zip(table, places, texts, strict=True):
        row |= {"index": index, "sample": sample, "tokens": tokens}
    if "raw_prompt" in prompts:
        for row, prompt in zip(table, prompts.objects("raw_prompt"), strict=True):
            row["prompt"] = prompt
    if logger.config.has_turns and "images" in batch.rows:
        for row, place in zip(table, chosen.tolist(), strict=True):
            row["image_pieces"] = list(numbers_of_pieces(batch.rows.objects("images")[place]))
    totals = {"loss": float(terms.sum()), "loss_magnitude": float(terms.abs().sum())}
    return RecordedStep(batch.step, len(batch.rows), columns, lengths, table, totals)


def first_prompts(uid: torch.Tensor, number: int) -> torch.Tensor:
    """int64: the rows of the first `number` groups, in the order of `uid` [B]; -1: all rows."""
    if number < 0:
        return torch.arange(len(uid))
    _, group = uid.unique(return_inverse=True)
    chosen: torch.Tensor = (group < number).nonzero()[:, 0]
    return chosen


def loss_terms(rows: Batch, config: RunConfig) -> torch.Tensor:
    """float32 [sampled tokens]: what each token adds to the policy loss while the policy is still the one whose
    log-probs are the old ones: -advantage x weights of rollout correction x its share in the mean over the step.

    The losses of all mini-batches together; those of an update also have the ratio of the policy that it has reached.
    """
    advantages = rows.flat("advantages")
    kept = torch.ones_like(advantages)
    for name in ("kept", "trained"):
        if name in rows:
            kept = kept * rows.flat(name)
    totals = BatchTotals(*counted(kept, rows.num_sampled).tolist())
    actor = config.actor_rollout_ref.actor
    scale = actor.loss_scale_factor or config.longest_response
    weights = token_weights(kept, rows.num_sampled, totals, policy_agg_mode(actor), scale)
    if "rollout_weights" in rows:
        weights = weights * rows.flat("rollout_weights")
    return -advantages * weights


def recorded_columns(rows: Batch, chosen: torch.Tensor | None = None) -> Iterator[tuple[str, Column, Column | None]]:
    """Yield (name, values, elements in each row or None) of columns, of the chosen rows (int64) or of all.

    Columns of prompts are in the table of samples. Tensors of several numbers for a token, such as a teacher's, are
    left out, but for experts, which a step on the record needs.
    """
    numbers = torch.arange(len(rows)) if chosen is None else chosen
    for name in rows.without(*PROMPT_COLUMNS).names:
        if not rows.stored(name).is_nested:
            yield name, rows[name][numbers].numpy(), None
        elif rows.stored(name).dim() == 2 or name == "routed_experts":
            column = rows.select(name)[numbers][name]
            yield name, column.values().numpy(), row_lengths(column).numpy()


def token_texts(logger: RunLogger, token_ids: Column, lengths: Column) -> list[list[str]]:
    """Return the text of every token of rows that lie end to end."""
    known, places = np.unique(token_ids, return_inverse=True)
    texts = logger.tokenizer.batch_decode([[token] for token in known.tolist()])
    flat = iter([texts[place] for place in places.tolist()])
    return [[next(flat) for _ in range(length)] for length in lengths.tolist()]
