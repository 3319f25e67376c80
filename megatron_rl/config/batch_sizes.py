"""How many prompts and samples a training step has, and how many of them an optimizer step has. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class UpdateSettings(Protocol):
    """Keys of a role that say how its optimizer steps are cut: actor and critic have them."""

    ppo_mini_batch_size: int
    ppo_epochs: int


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of one training step, over all ranks. They do not depend on the layout.

    num_prompts: prompts that a step trains, `data.train_batch_size`.
    num_generated_prompts: prompts of one batch of generation, `data.gen_batch_size`.
    samples_per_prompt: responses to each of them, `rollout.n`.
    """

    num_prompts: int
    num_generated_prompts: int
    samples_per_prompt: int

    @property
    def num_samples(self) -> int:
        """Samples that a step trains."""
        return self.num_prompts * self.samples_per_prompt

    @property
    def num_generated_samples(self) -> int:
        """Samples of one batch of generation."""
        return self.num_generated_prompts * self.samples_per_prompt

    def mini_batch_prompts(self, settings: UpdateSettings) -> int:
        """Prompts of one optimizer step: `ppo_mini_batch_size`, or all of the step's if these are fewer."""
        return min(settings.ppo_mini_batch_size, self.num_prompts)

    def mini_batch_samples(self, settings: UpdateSettings) -> int:
        """Samples of one optimizer step; the last one of an epoch has what is left."""
        return self.mini_batch_prompts(settings) * self.samples_per_prompt

    def num_optimizer_steps(self, settings: UpdateSettings) -> int:
        """Optimizer steps of one training step, over all its epochs."""
        return settings.ppo_epochs * -(-self.num_prompts // self.mini_batch_prompts(settings))


class ExampleSizes(BatchSizes):
    """Sizes of a step of sft, reward or dpo: one optimizer step on all examples, whatever the settings of a role."""

    def mini_batch_prompts(self, settings: UpdateSettings) -> int:
        """All of the step."""
        return self.num_prompts

    def num_optimizer_steps(self, settings: UpdateSettings) -> int:
        """1."""
        return 1
