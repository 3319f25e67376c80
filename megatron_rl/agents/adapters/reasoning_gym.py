"""Tasks of reasoning-gym, and their rewards (`adapter:reasoning_gym`). Rows are those of
`megatron-rl dataset --from reasoning_gym:NAME`; an episode is one turn, scored by the task's own `score_answer`.

kwargs: tag, the name of the part of a response that is scored: `<answer>5</answer>`; without it all of it counts. A
response that `score_answer` cannot read has a reward of 0, and counts as `unreadable`.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer


class Environment:
    """One task, and the score of its response."""

    def __init__(self, tag: str = "answer") -> None:
        self._tag = tag

    def reset(self, row: dict[str, Any]) -> None:
        """Read the task of a row."""
        extra = row.get("extra_info") or {}
        if not isinstance(extra.get("entry"), str):
            raise ValueError(f"row {row.get('index')}: extra_info.entry must be the task of reasoning-gym as JSON")
        self._entry = json.loads(extra["entry"])
        self._score = reasoning_gym.get_score_answer_fn(_known(self._entry["metadata"]["source_dataset"]))

    def step(self, turn: Any) -> dict[str, Any]:
        """Score the response."""
        answer = extract_answer(turn.text, self._tag) or turn.text.strip()
        try:
            reward, counts = float(self._score(answer=answer, entry=self._entry)), {}
        except Exception:
            self._score(answer=self._entry["answer"], entry=self._entry)  # raises what is no fault of the response
            reward, counts = 0.0, {"unreadable": 1.0}
        return {"messages": (), "reward": reward, "is_done": True, "counts": counts}


def rows(name: str, size: int, seed: int, **kwargs: Any) -> list[dict[str, Any]]:
    """Return tasks of a dataset of reasoning-gym. kwargs: settings of the dataset."""
    entries = reasoning_gym.create_dataset(_known(name), size=size, seed=seed, **kwargs)
    return [
        {"prompt": entry["question"], "ground_truth": str(entry["answer"]), "extra_info": {"entry": json.dumps(entry)}}
        for entry in entries
    ]


def _known(name: str) -> str:
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 3, 0.0)
        raise ValueError(f"reasoning-gym has no dataset {name}; did you mean: {', '.join(near)}")
    return name
