"""Contents of a checkpoint for batches that are not trained yet: their responses and the schedule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from megatron_rl.checkpoint.run_file import reading
from megatron_rl.sampling.in_flight import InFlightBatches, PromptsOf

ROLLOUTS_FILE = "rollouts.safetensors"
"""The file's tensors are responses of batches that are not trained yet; its metadata has the schedule."""

SCHEDULE = "schedule"


def write_rollouts(folder: Path, answers: InFlightBatches, schedule: dict[str, Any], step: int) -> None:
    """Write the responses of the steps after `step`. Raises OSError."""
    # If the step is given up, the batch that was taken for it must be there again.
    content = json.dumps(schedule | {"taken": min(schedule["taken"], step)})
    (folder / ROLLOUTS_FILE).write_bytes(save(answers.tensors(step), {SCHEDULE: content}))


def read_schedule(folder: Path) -> dict[str, Any] | None:
    """The schedule of a checkpoint; None if its run had none. Raises ConfigError for a damaged file."""
    file = folder / ROLLOUTS_FILE
    if not file.exists():
        return None
    with opened(file) as content:
        schedule: dict[str, Any] = json.loads(content.metadata()[SCHEDULE])
    return schedule


def read_answers(folder: Path, answers: InFlightBatches, prompts_of: PromptsOf | None = None) -> None:
    """Load the responses of a checkpoint into batches whose prompts were chosen again. prompts_of: of those that
    have changed places. Raises ConfigError for a damaged file.
    """
    with opened(folder / ROLLOUTS_FILE) as content:
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        answers.load_tensors(tensors, prompts_of)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The safetensors file. Raises ConfigError if it is damaged or does not have what the body reads."""
    with reading(file):
        try:
            with safe_open(file, "pt") as content:
                yield content
        except SafetensorError as error:
            raise ValueError(str(error)) from error
