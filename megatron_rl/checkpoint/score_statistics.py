"""Mean and standard deviation of a reward model's held-out scores, a file in its folder. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from megatron_rl.config.file_kinds import ABSENT, instead_of_file

FILE = "reward_statistics.json"
SCORE_MEAN, SCORE_STD = "val/score/mean", "val/score/std"
"""Metrics of a validation that report them; also kept in a checkpoint's run.json."""
IN_CONFIG = ("mean", "std")
"""Keys of config.json in which OpenRLHF's reward models store them."""
LARGEST_FILE = 16 << 20
"""Bytes that are read of either file; real ones have a few thousand."""


class StatisticsError(Exception):
    """A folder has no usable statistics; the message says why, as the rest of a sentence about the folder."""


@dataclass(frozen=True)
class ScoreStatistics:
    """Mean of held-out scores, and their sample standard deviation (divided by n - 1)."""

    mean: float
    std: float


def write_statistics(folder: Path, statistics: ScoreStatistics) -> None:
    """Write the statistics to a reward model's folder. Raises OSError."""
    (folder / FILE).write_text(json.dumps(asdict(statistics), indent=1) + "\n")


def saved_statistics(run: Mapping[str, Any]) -> ScoreStatistics | None:
    """Statistics of the validation after a checkpoint's step; None if there was none. run: "run" of its run.json."""
    held_out = run.get("held_out", {})
    if held_out.get("last_step") is None or held_out["last_step"] != run["step"]:
        return None
    last = held_out["last"]
    return ScoreStatistics(last[SCORE_MEAN], last[SCORE_STD]) if {SCORE_MEAN, SCORE_STD} <= last.keys() else None


def read_statistics(folder: Path) -> ScoreStatistics:
    """Read a reward model's statistics from `reward_statistics.json`, else `mean` and `std` of its config.json.

    Raises StatisticsError if there are none, or if the standard deviation is not > 0.
    """
    name = FILE if (folder / FILE).exists() else "config.json"
    content = _object_in(folder / name)
    values = [content.get(key) for key in IN_CONFIG]
    if values == [None, None]:
        raise StatisticsError(f"it has no {FILE}, and its config.json no mean and std")
    numbers = [float(value) for value in values if is_number(value)]
    if len(numbers) < 2 or not numbers[1] > 0:
        given = ", ".join(f"{key}={value!r:.80}" for key, value in zip(IN_CONFIG, values, strict=True))
        raise StatisticsError(f"its {name} has {given}, which must be finite numbers, the second > 0")
    return ScoreStatistics(*numbers)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _object_in(file: Path) -> dict[str, Any]:
    lacks = instead_of_file(file)
    if lacks not in (None, ABSENT):
        raise StatisticsError(f"its {file.name} must be a file, and {lacks}")
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise StatisticsError(f"its {file.name} has more than {LARGEST_FILE} bytes")
        content = json.loads(file.read_text())
    except OSError as error:
        raise StatisticsError(f"its {file.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StatisticsError(f"its {file.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise StatisticsError(f"its {file.name} is not an object in braces")
    return content
