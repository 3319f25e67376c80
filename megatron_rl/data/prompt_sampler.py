"""Prompts that a class of the user's chooses, such as a curriculum that follows the scores of earlier responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.config.schema import PromptSamplerConfig
from megatron_rl.config.user_functions import load_class, reward_errors
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.prompt_mixture import PromptCursor
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.plain_values import describe_error, quote

KEY = "data.sampler.path"
METHODS = ("next_indices", "update", "state_dict", "load_state_dict")


class PromptSampler:
    """A cursor (see `MixtureCursor`) over prompts that a class of the user's chooses.

    Batches that are chosen and not trained are remembered, so that a checkpoint has them. What the class raises becomes
    a RewardError.
    """

    def __init__(self, config: PromptSamplerConfig, data: PromptDataset, batch_size: int, seed: int) -> None:
        """Raises ConfigError for a class that cannot be loaded or made."""
        assert config.path is not None
        kind = load_class(config.path, KEY, config.name, METHODS)
        self._name, self._num_prompts, self._batch_size = f"{config.name} of {config.path}", len(data), batch_size
        self._files = [file.identity for file in data.files]
        rows = data.rows
        self._positions = {row["index"]: position for position, row in enumerate(rows)}
        try:
            self._sampler: Any = kind(rows, batch_size, seed, **config.kwargs)
        except Exception as error:
            raise ConfigError(f"{KEY}={config.path}: {config.name} raised {describe_error(error)}") from error
        self._begun: list[list[int]] = []

    def next_indices(self) -> list[int]:
        """The positions of the batch that is trained next, each in [0, number of prompts). Raises RewardError."""
        return self._begun.pop(0) if self._begun else self._draw()

    def ahead(self) -> PromptCursor:
        """A cursor for batches that are begun before they are trained; it chooses what this one gives later."""
        return PrefetchedBatches(self._begun, self._draw)

    def update(self, index: Sequence[int], scores: Sequence[float]) -> None:
        """Say what the responses of a step have scored. index: numbers of their prompts. Raises RewardError."""
        with reward_errors(f"update of {self._name}"):
            self._sampler.update([self._positions[number] for number in index], list(scores))

    def state_dict(self) -> dict[str, Any]:
        """The state of the user's class, which must be JSON, and batches that are chosen and not trained. Raises
        RewardError.
        """
        with reward_errors(f"state_dict of {self._name}"):
            own = json.loads(json.dumps(self._sampler.state_dict()))
        return {"files": self._files, "begun": self._begun, "sampler": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ConfigError for other files or another way to choose."""
        if state.get("files") != self._files or "sampler" not in state:
            raise ConfigError(
                f"cannot resume the prompt order: {KEY} and data.train_files must be as they were when it was saved; "
                "set them back, or start a new run"
            )
        self._begun[:] = [list(batch) for batch in state["begun"]]
        with reward_errors(f"load_state_dict of {self._name}"):
            self._sampler.load_state_dict(state["sampler"])

    def _draw(self) -> list[int]:
        with reward_errors(f"next_indices of {self._name}"):
            indices = [int(index) for index in self._sampler.next_indices()]
        if len(indices) != self._batch_size or not all(0 <= index < self._num_prompts for index in indices):
            rule = f"must return {self._batch_size} positions from 0 to {self._num_prompts - 1}"
            raise RewardError(f"next_indices of {self._name} {rule}; it returned {quote(indices)}")
        return indices


class PrefetchedBatches:
    """Draws batches that are trained later, after those that a checkpoint had chosen."""

    def __init__(self, begun: list[list[int]], draw: Callable[[], list[int]]) -> None:
        self._waiting, self._begun, self._draw = [list(batch) for batch in begun], begun, draw

    def next_indices(self) -> list[int]:
        """The positions of the next batch. Raises RewardError."""
        if self._waiting:
            return self._waiting.pop(0)
        self._begun.append(self._draw())
        return self._begun[-1]
