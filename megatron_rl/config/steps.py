"""The number of steps of a run, from its prompts."""

from __future__ import annotations

import copy

from megatron_rl.config.schema import Config, RunConfig
from megatron_rl.config.trainer import TrainerConfig

DEFAULT_EPOCHS = 30
"""Epochs of a run whose configuration sets neither steps nor epochs."""


def num_steps(config: RunConfig, num_prompts: int) -> int:
    """Steps of a run: the smaller of its limits in steps and in epochs.

    An epoch has as many steps as `num_prompts` prompts have full batches, at least one. With dynamic sampling a step
    may take several batches.
    """
    steps, epochs = config.trainer.total_training_steps, config.trainer.total_epochs
    per_epoch = max(1, num_prompts // config.batch_sizes.num_generated_prompts)
    if epochs is None:
        return steps if steps is not None else DEFAULT_EPOCHS * per_epoch
    return epochs * per_epoch if steps is None else min(steps, epochs * per_epoch)


def with_steps(config: Config, num_prompts: int) -> Config:
    """The configuration with the number of steps in it."""
    changed = copy.deepcopy(config)
    changed.trainer.total_training_steps = num_steps(config, num_prompts)
    return changed


def is_save_step(trainer: TrainerConfig, step: int) -> bool:
    """Whether a checkpoint follows this step: every `save_freq` steps and after the last, if `save_freq` > 0."""
    return trainer.save_freq > 0 and (step % trainer.save_freq == 0 or step == trainer.num_steps)


def is_validation_step(trainer: TrainerConfig, step: int) -> bool:
    """Whether validation follows this step: every `test_freq` steps and after the last, unless it is switched off."""
    is_due = trainer.test_freq > 0 and step % trainer.test_freq == 0
    return validates(trainer) and (is_due or step == trainer.num_steps)


def validates(trainer: TrainerConfig) -> bool:
    """Whether a run validates at all: not with `test_freq` 0 and `val_before_train` false."""
    return trainer.test_freq > 0 or trainer.val_before_train
