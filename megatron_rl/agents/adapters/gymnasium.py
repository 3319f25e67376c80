"""A gymnasium environment whose observations and actions are texts, or can be written as such (`adapter:gymnasium`).

kwargs: id, of the environment; actions, the names of a discrete space's actions; instruction, which precedes
the first observation; others are those of `gymnasium.make`. With render_mode="ansi" the policy reads what is rendered.
An episode's seed is `extra_info.seed`, else the row's index.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import gymnasium


class Environment:
    """One episode. A text that names no action gets the names as its observation, and no step is taken."""

    @staticmethod
    def check(id: str, actions: list[str] | None = None, instruction: str = "", **kwargs: Any) -> None:
        """Raise ValueError for what cannot be made."""
        if id.split(":")[-1] not in gymnasium.registry and ":" not in id:
            near = difflib.get_close_matches(id, gymnasium.registry, 3, 0.0)
            raise ValueError(f"gymnasium has no environment {id}; did you mean: {', '.join(near)}")
        gymnasium.make(id, **kwargs).close()

    def __init__(self, id: str, actions: list[str] | None = None, instruction: str = "", **kwargs: Any) -> None:
        self._env, self._names, self._instruction = gymnasium.make(id, **kwargs), actions or [], instruction

    def reset(self, row: dict[str, Any]) -> None:
        """Begin with the row's seed."""
        seed = (row.get("extra_info") or {}).get("seed", row["index"])
        self._first = self._seen(self._env.reset(seed=int(seed))[0])

    def opening(self) -> str:
        """Return the instruction and the first observation."""
        return f"{self._instruction}{self._first}"

    def step(self, turn: Any) -> Any:
        """Take the action that the turn names."""
        action = self._action(turn.text.strip())
        if action is None:
            known = ", ".join(self._names) or str(self._env.action_space)
            return {"messages": f"no action; actions are: {known}", "counts": {"invalid_action": 1.0}}
        seen, reward, terminated, truncated, _ = self._env.step(action)
        return self._seen(seen), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _action(self, text: str) -> Any:
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            return text
        if text in self._names:
            return int(space.start) + self._names.index(text)
        number = re.fullmatch(r"-?\d+", text)
        return int(text) if number and not self._names and space.contains(int(text)) else None

    def _seen(self, observation: Any) -> str:
        return str(self._env.render() if self._env.render_mode == "ansi" else observation)


def rows(name: str, size: int, seed: int, **kwargs: Any) -> list[dict[str, Any]]:
    """Return tasks of an environment: seeds."""
    Environment.check(name, **kwargs)
    return [{"prompt": name, "ground_truth": "", "extra_info": {"seed": seed + place}} for place in range(size)]
