"""Which samples a run has recorded: of each step the best and the worst, of one step all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.observe.sample_files import RecordedStep, read_step
from megatron_rl.view.sample_life import check_rows, outcome_of, plain, quoted, short

LONGEST = 48
"""Characters of a response in a table."""
STEP_HEADINGS = ("step", "recorded", "of", "best", "score", "response", "worst", "score", "response")
SAMPLE_HEADINGS = ("sample", "prompt", "score", "end", "tokens", "response")


def listed_steps(files: Mapping[int, Path]) -> list[dict[str, Any]]:
    """Return of each recorded step its numbers, and its best and worst sample by score, JSON-ready.

    A step has neither where no sample has a finite score. Raises ConfigError for a file that cannot be read, or lacks
    what is listed.
    """
    return [_listed(read_step(file)) for file in files.values()]


def _listed(recorded: RecordedStep) -> dict[str, Any]:
    samples = listed_samples(recorded)
    scored = [sample for sample in samples if sample["score"] is not None]
    ends = {"best": max, "worst": min}
    chosen = {name: take(scored, key=lambda sample: sample["score"]) for name, take in ends.items() if scored}
    return {"step": recorded.step, "recorded": len(samples), "samples": recorded.num_rows} | chosen


def listed_samples(recorded: RecordedStep) -> list[dict[str, Any]]:
    """Return number, prompt, score, end, tokens and response of each recorded sample of a step, JSON-ready."""
    check_rows(recorded)
    return [
        {
            "sample": row,
            "prompt": details["input"],
            "score": plain(recorded.columns["scores"][row]),
            "outcome": outcome_of(recorded, row),
            "tokens": int(np.asarray(recorded.of("sampled", row)).sum()),
            "answer": details["output"],
        }
        for row, details in enumerate(recorded.rows)
    ]


def step_rows(steps: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the texts of a table with `STEP_HEADINGS`."""
    for step in steps:
        row = [str(step["step"]), str(step["recorded"]), str(step["samples"])]
        for name in ("best", "worst"):
            sample = step.get(name)
            row += (
                ["", "", ""] if sample is None else [str(sample["sample"]), short(sample["score"]), beginning(sample)]
            )
        yield row


def sample_rows(samples: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the texts of a table with `SAMPLE_HEADINGS`."""
    for one in samples:
        texts = (str(one["sample"]), beginning(one, "prompt"), short(one["score"]), one["outcome"], str(one["tokens"]))
        yield [*texts, beginning(one)]


def beginning(sample: Mapping[str, Any], name: str = "answer") -> str:
    """Return the first characters of a text of a sample, in one line."""
    text = quoted(sample[name])
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
