"""Gradients of losses that compare answers with each other, for a policy or a reward model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.experience.micro_batches import MicroBatch, MicroBatching
from megatron_rl.losses.metrics import MetricParts
from megatron_rl.losses.objectives import Objective
from megatron_rl.losses.terms import Answers
from megatron_rl.records import Batch, answer_rows, num_answers, ragged_from_lengths
from megatron_rl.roles.pipeline import PerToken
from megatron_rl.roles.training import TrainableModel


def with_prompts(block: MicroBatch, prompt_of_row: Tensor) -> MicroBatch:
    """Return the block with the numbers of its prompts, and of each the number of its responses; all on the CPU."""
    prompts, sizes = prompt_of_row[block.rows].unique_consecutive(return_counts=True)
    return replace(block, fields=block.fields | {"prompts": prompts, "num_answers": sizes})


class PreferenceTrainer:
    """Gradients and scores of responses under one model; all ranks must call.

    per_token: one number per scored token. of_rows: a response's number [B] from those of its tokens [T] and their
    counts [B].
    """

    def __init__(
        self,
        trainable: TrainableModel,
        per_token: PerToken,
        objective: Objective,
        of_rows: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.trainable, self.per_token, self.objective, self.of_rows = trainable, per_token, objective, of_rows

    def scores(self, batch: Batch, cut: MicroBatching) -> Batch | None:
        """`answer_scores`: the number of each response; on the last stage, None before."""
        rows = answer_rows(batch)
        pipeline = self.trainable.pipeline
        flat = pipeline.forward(rows, cut, self.per_token)
        if flat is None:
            return None
        numbers = self.of_rows(flat, rows.num_sampled)
        return Batch(answer_scores=ragged_from_lengths(numbers, num_answers(batch)))

    def compute_gradients(
        self, batch: Batch, cut: MicroBatching, num_prompts: int, baseline: float, role: str
    ) -> dict[str, float]:
        """Gradients of the mean loss over the `num_prompts` of all ranks; responses to one prompt share a micro-batch.

        baseline: kto's. Returns metrics, whose names begin with `role`, on the last stage; {} before.
        """
        trainable, device = self.trainable, self.trainable.device
        num_of_prompt = num_answers(batch)
        prompt_of_row = torch.repeat_interleave(num_of_prompt)
        blocks = [
            with_prompts(block, prompt_of_row)
            for block in trainable.pipeline.micro_batches(answer_rows(batch), cut, num_of_prompt.tolist())
        ]
        given, labels = batch.flat("given").to(device), batch.flat("labels").to(device)
        weights, shift = batch["weights"].to(device), torch.tensor(baseline, device=device)

        def loss(output: Tensor, block: MicroBatch) -> tuple[Tensor, MetricParts]:
            numbers = self.of_rows(self.per_token(output, block), block.num_sampled)
            prompts, sizes = block.fields["prompts"], block.fields["num_answers"]
            answers = Answers(numbers, given[block.rows], labels[block.rows], sizes, shift, block.num_sampled)
            terms = self.objective(answers)
            total = (terms.loss * weights[prompts]).sum() / max(num_prompts, 1)
            # Padding prompts have blocks of their own, so a block counts as a whole or not at all.
            counts = weights[prompts].sum() > 0
            parts = {"loss": total.detach(), **terms.metrics}
            return total, {f"{role}/{name}": torch.where(counts, part, 0.0) for name, part in parts.items()}

        return trainable.compute_gradients(blocks, trainable.totals(blocks), loss) or {}
