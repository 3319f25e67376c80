"""The order in which training visits the prompts: endless, seeded, resumable. Pure arithmetic."""

from __future__ import annotations

import random
from typing import Any

from megatron_rl.errors import ConfigError


class PromptCursor:
    """Yields batches of prompt positions, epoch after epoch.

    Every epoch visits each of `num_prompts` positions once, in order or (`shuffle`) in a permutation that depends on
    (seed, epoch) alone. A batch may straddle epochs, so every batch is full and no prompt is lost; such a batch, or
    one larger than the dataset, can hold a prompt more than once.
    """

    def __init__(self, num_prompts: int, batch_size: int, shuffle: bool, seed: int):
        """Start at the first prompt of epoch 0. Raises ConfigError unless both sizes are at least 1."""
        if num_prompts < 1 or batch_size < 1:
            raise ConfigError(
                f"cannot draw batches of {batch_size} prompts from {num_prompts} prompts: both must be at least 1; "
                f"the nearest valid sizes are {max(batch_size, 1)} from {max(num_prompts, 1)}"
            )
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self._order = self._epoch_order()

    def next_indices(self) -> list[int]:
        """The next `batch_size` positions, each in [0, num_prompts)."""
        indices: list[int] = []
        while len(indices) < self.batch_size:
            if self.position == self.num_prompts:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order()
            end = min(self.position + self.batch_size - len(indices), self.num_prompts)
            indices += self._order[self.position : end]
            self.position = end
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Where the cursor stands, and the dataset and order for which that means something; JSON-ready."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_prompts": self.num_prompts,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; `batch_size` may differ. Raises ConfigError if the order is another one."""
        for key, own in (("num_prompts", self.num_prompts), ("shuffle", self.shuffle), ("seed", self.seed)):
            if state[key] != own:
                raise ConfigError(
                    f"cannot resume the prompt order: {key} is {own} now and was {state[key]} when it was saved; "
                    f"set it back to {state[key]}, or start a new run"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        order = list(range(self.num_prompts))
        if self.shuffle:
            random.Random(f"{self.seed},{self.epoch}").shuffle(order)
        return order
