"""The batches of coming steps: drawn from the prompts ahead of training, and what a checkpoint keeps of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from megatron_rl.checkpoint.run_file import reading
from megatron_rl.data.prompt_mixture import MixtureCursor
from megatron_rl.records import Prompts, Sampling
from megatron_rl.sampling.open_answers import OpenAnswers

ROLLOUTS_FILE = "rollouts.safetensors"
"""In a checkpoint: the answers of batches that are not trained yet, and in its metadata the schedule."""

SCHEDULE = "schedule"


class PromptBatches:
    """Adds batches to `answers` in their order.

    cursor: where training stands, behind which the batches are drawn; it is not moved. ask: (cursor) -> the next
    prompts, and of them those that get a greedy answer. sampling: step -> how its answers are drawn.
    """

    def __init__(
        self,
        answers: OpenAnswers,
        cursor: MixtureCursor,
        trained_step: int,
        ask: Callable[[MixtureCursor], tuple[Prompts, Prompts | None]],
        sampling: Callable[[int], Sampling],
        greedily: Sampling,
    ) -> None:
        self._answers, self._ask, self._sampling, self._greedily = answers, ask, sampling, greedily
        self._cursor = copy.deepcopy(cursor)
        self._drawn = trained_step

    def draw(self, last: int) -> None:
        """Have all batches until that of step `last`."""
        while self._drawn < last:
            self._drawn += 1
            prompts, greedy = self._ask(self._cursor)
            self._answers.add(self._drawn, prompts, self._sampling(self._drawn), greedy, self._greedily)


def write_rollouts(folder: Path, answers: OpenAnswers, schedule: dict[str, Any], step: int) -> None:
    """Keep what was drawn for the steps after `step`. Raises OSError."""
    # A batch that was taken for a step that is given up is there again.
    content = json.dumps(schedule | {"taken": min(schedule["taken"], step)})
    (folder / ROLLOUTS_FILE).write_bytes(save(answers.tensors(step), {SCHEDULE: content}))


def read_schedule(folder: Path) -> dict[str, Any] | None:
    """The schedule of a checkpoint; None where generation did not run ahead. Raises ConfigError for a damaged file."""
    file = folder / ROLLOUTS_FILE
    if not file.exists():
        return None
    with opened(file) as content:
        schedule: dict[str, Any] = json.loads(content.metadata()[SCHEDULE])
    return schedule


def read_answers(folder: Path, answers: OpenAnswers) -> None:
    """Give batches that were drawn anew the answers that a checkpoint has. Raises ConfigError for a damaged file."""
    with opened(folder / ROLLOUTS_FILE) as content:
        answers.load_tensors({name: content.get_tensor(name) for name in content.keys()})  # noqa: SIM118


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The safetensors file. Raises ConfigError where it is damaged, or has not what is looked for."""
    with reading(file):
        try:
            with safe_open(file, "pt") as content:
                yield content
        except SafetensorError as error:
            raise ValueError(str(error)) from error
