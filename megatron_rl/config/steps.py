"""How many steps a run takes, where that follows from its prompts."""

from __future__ import annotations

import copy

from megatron_rl.config.schema import DataConfig, RunConfig
from megatron_rl.config.trainer import TrainerConfig

DEFAULT_EPOCHS = 30
"""Of a run that is told neither its steps nor its epochs."""


def num_steps(trainer: TrainerConfig, data: DataConfig, num_prompts: int) -> int:
    """The first of both limits: steps, and epochs of as many steps as there are full batches, at least one."""
    steps, epochs = trainer.total_training_steps, trainer.total_epochs
    if epochs is None:
        return steps if steps is not None else DEFAULT_EPOCHS * steps_of_epoch(data, num_prompts)
    in_epochs = epochs * steps_of_epoch(data, num_prompts)
    return in_epochs if steps is None else min(steps, in_epochs)


def steps_of_epoch(data: DataConfig, num_prompts: int) -> int:
    """Full batches that are drawn of so many prompts; with dynamic sampling a step may take several."""
    return max(1, num_prompts // data.gen_batch_size)


def with_steps(config: RunConfig, num_prompts: int) -> RunConfig:
    """The configuration with the number of steps in it."""
    changed = copy.deepcopy(config)
    changed.trainer.total_training_steps = num_steps(config.trainer, config.data, num_prompts)
    return changed


def is_save_step(trainer: TrainerConfig, step: int) -> bool:
    """Every `save_freq` steps and the last, where checkpoints are written."""
    return trainer.save_freq > 0 and (step % trainer.save_freq == 0 or step == trainer.num_steps)


def is_validation_step(trainer: TrainerConfig, step: int) -> bool:
    """Every `test_freq` steps, and always the last."""
    return step == trainer.num_steps or (trainer.test_freq > 0 and step % trainer.test_freq == 0)
