"""Tables of samples: one jsonl file per step, one row per answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.observe.summary import finite_or_null


def write_sample_table(folder: Path, step: int, rows: Iterable[dict[str, Any]]) -> Path:
    """Write `rows` to `folder/STEP.jsonl`, as verl names it, in place of an earlier table of that step.

    What JSON does not have is written as text; floats that are not finite become null. Returns the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{step}.jsonl"
    unfinished = file.with_name(file.name + ".unfinished")
    with unfinished.open("w") as lines:
        for row in rows:
            lines.write(json.dumps(finite_or_null(row), ensure_ascii=False, allow_nan=False, default=str) + "\n")
    unfinished.replace(file)  # at one instant, so that no table is half there
    return file
