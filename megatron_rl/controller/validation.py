"""Validation: when a run validates, and how PPO does it: responses of the current policy to held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.cluster.signals import StopRequest
from megatron_rl.columns import COLUMNS, SCORING
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.steps import is_validation_step, validates
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.observe.validation_metrics import validation_metrics
from megatron_rl.records import Batch, repeated
from megatron_rl.sampling.sampler import Sampler
from megatron_rl.scoring.batch_scorers import Scorer, score
from megatron_rl.scoring.sampled_batch import SampledBatch

NUM_PARITY_ROWS = 32
"""Held-out rows on which the exported model is compared with the trainer."""


class Validation:
    """When a run validates: before training, after the configured steps, and after a resume for a step that skipped it.

    `run` is what a subclass defines.
    """

    def __init__(self, config: RunConfig, logger: RunLogger, stop: StopRequest) -> None:
        self.config, self.logger, self._stop = config, logger, stop

    def run(self, step: int) -> dict[str, float]:
        """Validate the weights after `step`, 0 before training; returns metrics."""
        raise NotImplementedError

    def before_training(self, is_resumed: bool) -> None:
        """Validate a new run where configured, or make up for the validation that a signal kept the last run from."""
        if self.config.trainer.val_before_train and not is_resumed:
            self.logger.title("Validation before training")
            self.logger.log(self.run(step=0), step=0)
        self.logger.make_up(self.run)

    def after(self, step: int) -> dict[str, float]:
        """Validate if due after `step`; a run that is to stop leaves it to the run that resumes."""
        if not is_validation_step(self.config.trainer, step):
            return {}
        if self._stop.is_set:
            self.logger.skip_validation(step)
            return {}
        return self.run(step)


class PromptValidation(Validation):
    """Generates responses to every held-out prompt, `val_kwargs.n` times; metrics per data source, under verl's names.

    parity_rows: a few rows to compare the exported model on: of the last validation, or, without validation, of the
    last step. None before the first.
    """

    def __init__(
        self,
        config: RunConfig,
        logger: RunLogger,
        stop: StopRequest,
        data: PromptDataset,
        sampler: Sampler,
        scorers: Sequence[Scorer],
    ) -> None:
        super().__init__(config, logger, stop)
        self.data, self.sampler, self.scorers = data, sampler, scorers
        self.parity_rows: Batch | None = None

    def run(self, step: int) -> dict[str, float]:
        """Validate now; keeps mean reward, mean accuracy and a few rows."""
        with self.logger.clock.phase("testing"):
            batch = self.answered(range(len(self.data)), step)
            scored, rows = batch.all_scored, batch.rows
            self.logger.save_samples(self.config.trainer.validation_data_dir, rows, scored, step)
            self.logger.save_generations(rows, scored, step)
            variables = scored.variables() | {"reward": rows["scores"].tolist()}
            self.logger.val_rewards.append(mean(variables["reward"]))
            if "acc" in variables:
                self.logger.accuracies.append(mean(variables["acc"]))
            self.take_parity_rows(rows)
            sources, predictions = rows.objects("data_source"), scored.predictions()
            metrics = validation_metrics(sources, rows["index"].tolist(), variables, predictions)
        metrics |= {f"val-aux/{name}": value for name, value in batch.metrics.items()}
        return metrics | self.logger.clock.take("testing")

    def at_the_end(self, step: int) -> None:
        """Validate the last weights of a run that has no step left; without validation answer a few prompts, which the
        export is compared on.
        """
        if validates(self.config.trainer):
            self.run(step)
        elif self.config.trainer.export_hf:
            few = range(min(NUM_PARITY_ROWS, len(self.data)))
            self.take_parity_rows(self.answered(few, step).rows)

    def take_parity_rows(self, rows: Batch) -> None:
        """Keep a few rows, to compare the exported model on; a trained tower reads their patches as it is then."""
        self.parity_rows = rows[:NUM_PARITY_ROWS].select(*COLUMNS.read_by(SCORING), "image_patches")

    def answered(self, prompts: Sequence[int], step: int) -> SampledBatch:
        """Responses, with their scores, to the held-out prompts with these numbers, each `val_kwargs.n` times."""
        asked = repeated(self.data.batch(prompts), self.config.actor_rollout_ref.rollout.val_kwargs.n)
        batch = SampledBatch(step, self.sampler.answer(asked, self.sampler.val_sampling()))
        score(self.scorers, batch)
        return batch


def mean(values: Sequence[float | None]) -> float:
    """Mean over all rows; a row without a value counts as 0."""
    return sum(value for value in values if value is not None) / len(values)
