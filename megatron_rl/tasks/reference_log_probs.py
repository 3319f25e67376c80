"""Batches of preferences with the reference's log-probs, which the loss compares the policy with."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch

from megatron_rl.columns import SCORING
from megatron_rl.data.reading import Labelled, Ranking
from megatron_rl.errors import ConfigError
from megatron_rl.losses.objectives import preference_objective
from megatron_rl.losses.preferences import kto_baseline
from megatron_rl.losses.rows import sum_rows
from megatron_rl.losses.terms import Answers
from megatron_rl.records import Batch, answer_rows, num_answers, ragged_from_lengths
from megatron_rl.roles.supervised_policy import SupervisedPolicy
from megatron_rl.tasks.task_data import TRAIN, VAL
from megatron_rl.tasks.task_run import TaskRun
from megatron_rl.tasks.training_records import answers_of, preference_batch
from megatron_rl.tasks.validation_loss import LOSS

MISMATCHED = "_mismatched"
CHUNK = 16
"""Batches that are scored in one call when all responses are scored before the first step."""


def digest_of(records: Sequence[Ranking] | Sequence[Labelled]) -> str:
    """SHA-256 of all tokens, loss masks and images, in their order."""
    digest = sha256()
    for record in records:
        for answer in answers_of(record):
            digest.update(f"{len(answer.tokens)},{answer.prompt_length};".encode())
            digest.update(answer.tokens.numpy().tobytes() + answer.loss_mask.numpy().tobytes())
            digest.update("".join(piece.digest for piece in answer.images).encode())
    return digest.hexdigest()


class Preferences:
    """Batches of one run with everything their loss needs in addition to the policy."""

    def __init__(self, run: TaskRun) -> None:
        self.run, self.config = run, run.config.dpo
        self.policy = run.role(SupervisedPolicy)
        self.sets: dict[str, list[Any]] = {TRAIN: run.data.train, VAL: run.data.val}
        self.sets |= {f"{name}{MISMATCHED}": rows for name, rows in run.data.mismatched.items()}
        self.is_stored = run.config.needs_reference and not run.config.holds_reference

    def store_reference(self) -> None:
        """Score all responses with the policy as it starts, if its scores are stored and a new run begins.

        Raises StoppedBeforeStep between chunks if a signal asked to stop, ConfigError if a resumed checkpoint does not
        have these scores or has those of other responses.
        """
        stored, path = self.run.stored, self.run.logger.folder.start.path
        for name, records in self.sets.items() if self.is_stored else ():
            answers = digest_of(records)
            if path is not None:
                if not stored.holds(name, answers):
                    rule = f"{path} does not hold the reference's log-probs of these {len(records)} examples ({name})"
                    raise ConfigError(
                        f"{rule}; try: the files and lengths it was made with, or dpo.reference=on_the_fly"
                    )
                continue
            size = CHUNK * self.run.config.data.train_batch_size
            scores: list[torch.Tensor] = []
            for first in range(0, len(records), size):
                self.run.life.check_stop()
                chunk = self.run.with_images(preference_batch(records[first : first + size]))
                scores += self.policy.answer_log_probs(chunk).get()["answer_scores"].unbind()
            stored.put(name, scores, answers)

    def batch(self, name: str, numbers: Sequence[int]) -> Batch:
        """Some prompts of a set, with the reference's log-probs if the loss reads them."""
        batch = self.run.with_images(preference_batch([self.sets[name][number] for number in numbers]))
        reference = self.run.reference
        if self.is_stored:
            batch.add(given=self.run.stored.ragged(name, numbers))
        elif reference is not None:
            rows = answer_rows(batch)
            log_probs = reference.log_probs(rows.read_by(SCORING)).get().flat("ref_log_probs")
            summed = sum_rows(log_probs, rows.num_sampled)
            batch.add(given=ragged_from_lengths(summed, num_answers(batch)))
        return batch

    def baseline(self, name: str, numbers: Sequence[int]) -> float:
        """kto's baseline: the drift of the policy on responses to other prompts; 0 for other losses."""
        if "kto" not in self.config.loss:
            return 0.0
        batch = self.batch(f"{name}{MISMATCHED}", numbers)
        ours = self.policy.answer_log_probs(batch).get().flat("answer_scores")
        return float(kto_baseline((ours - batch.flat("given")).sum(), len(batch)))

    def measured(self) -> dict[str, float]:
        """Loss of all held-out preferences, and the metrics of the loss."""
        numbers = range(len(self.run.data.val))
        batch = self.batch(VAL, numbers)
        ours = self.policy.answer_log_probs(batch).get().flat("answer_scores")
        shift = torch.tensor(self.baseline(VAL, numbers))
        lengths = answer_rows(batch).num_sampled
        answers = Answers(ours, batch.flat("given"), batch.flat("labels"), num_answers(batch), shift, lengths)
        terms = preference_objective(self.config)(answers)
        means = {f"val/{name}": float(pair[0] / pair[1]) for name, pair in terms.metrics.items() if pair[1]}
        return {LOSS: float(terms.loss.mean())} | means
