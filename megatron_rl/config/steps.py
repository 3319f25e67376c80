"""The number of steps of a run, from its prompts."""

from __future__ import annotations

import copy

from megatron_rl.config.schema import DataConfig, RunConfig
from megatron_rl.config.trainer import TrainerConfig

DEFAULT_EPOCHS = 30
"""Epochs of a run whose configuration sets neither steps nor epochs."""


def num_steps(trainer: TrainerConfig, data: DataConfig, num_prompts: int) -> int:
    """Steps of a run: the smaller of its limits in steps and in epochs. An epoch has at least one step."""
    steps, epochs = trainer.total_training_steps, trainer.total_epochs
    if epochs is None:
        return steps if steps is not None else DEFAULT_EPOCHS * steps_of_epoch(data, num_prompts)
    in_epochs = epochs * steps_of_epoch(data, num_prompts)
    return in_epochs if steps is None else min(steps, in_epochs)


def steps_of_epoch(data: DataConfig, num_prompts: int) -> int:
    """Full batches of `num_prompts` prompts, at least one; with dynamic sampling a step may take several."""
    return max(1, num_prompts // data.gen_batch_size)


def with_steps(config: RunConfig, num_prompts: int) -> RunConfig:
    """The configuration with the number of steps in it."""
    changed = copy.deepcopy(config)
    changed.trainer.total_training_steps = num_steps(config.trainer, config.data, num_prompts)
    return changed


def is_save_step(trainer: TrainerConfig, step: int) -> bool:
    """Whether a checkpoint follows this step: every `save_freq` steps and after the last, if `save_freq` > 0."""
    return trainer.save_freq > 0 and (step % trainer.save_freq == 0 or step == trainer.num_steps)


def is_validation_step(trainer: TrainerConfig, step: int) -> bool:
    """Whether validation follows this step: every `test_freq` steps, and always after the last."""
    return step == trainer.num_steps or (trainer.test_freq > 0 and step % trainer.test_freq == 0)
