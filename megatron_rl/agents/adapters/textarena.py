"""A game of textarena for one player, or against a fixed opponent (`adapter:textarena`).

kwargs: id, of the game; players, its number of players; opponent, the action of all players but the policy, or the name
`random`: a number in brackets, from 0 to 8; others are those of `textarena.make`. An episode's seed is
`extra_info.seed`, else the row's index. The reward is the policy's at the end of the game.
"""

from __future__ import annotations

import difflib
import random
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY

POLICY = 0


class Environment:
    """One game. Python's global generator, from which games sample, has a state of its own in each."""

    @staticmethod
    def check(id: str, **kwargs: Any) -> None:
        """Raise ValueError for a game that does not exist."""
        if id not in ENV_REGISTRY:
            near = difflib.get_close_matches(id, ENV_REGISTRY, 3, 0.0)
            raise ValueError(f"textarena has no game {id}; did you mean: {', '.join(near)}")

    def __init__(self, id: str, players: int = 1, opponent: str = "random", **kwargs: Any) -> None:
        self._make, self._players, self._opponent = (id, kwargs), players, opponent

    def reset(self, row: dict[str, Any]) -> None:
        """Begin the game of the row's seed."""
        self._seed = int((row.get("extra_info") or {}).get("seed", row["index"]))
        random.seed(self._seed)
        self._state = random.getstate()
        self._first = self._played(self._begin)

    def opening(self) -> str:
        """Return the first observation."""
        text: str = self._first[0]
        return text

    def step(self, turn: Any) -> tuple[str, float, bool]:
        """Play the policy's action, and then the opponent's."""
        return self._played(lambda: self._act(turn.text))

    def _played(self, move: Any) -> tuple[str, float, bool]:
        random.setstate(self._state)
        try:
            return move()  # type: ignore[no-any-return]
        finally:
            self._state = random.getstate()

    def _begin(self) -> tuple[str, float, bool]:
        name, kwargs = self._make
        self._env = textarena.make(name, **kwargs)
        self._env.reset(num_players=self._players, seed=self._seed)
        return self._until_the_policy(False)

    def _act(self, action: str) -> tuple[str, float, bool]:
        is_done, _ = self._env.step(action=action)
        return self._until_the_policy(is_done)

    def _until_the_policy(self, is_done: bool) -> tuple[str, float, bool]:
        player, seen = (POLICY, "") if is_done else self._env.get_observation()
        while not is_done and player != POLICY:
            action = f"[{random.randrange(9)}]" if self._opponent == "random" else self._opponent
            is_done, _ = self._env.step(action=action)
            player, seen = (POLICY, "") if is_done else self._env.get_observation()
        if is_done:
            rewards, _ = self._env.close()
            return "", float((rewards or {}).get(POLICY, 0.0)), True
        return _text(seen), 0.0, False


def _text(seen: Any) -> str:
    """Return an observation as a text, without the policy's own actions, which it has before it."""
    if isinstance(seen, str):
        return seen
    return "\n".join(text for sender, text, _ in seen if sender != POLICY)


def rows(name: str, size: int, seed: int, **kwargs: Any) -> list[dict[str, Any]]:
    """Return tasks of a game: seeds."""
    Environment.check(name)
    return [{"prompt": name, "ground_truth": "", "extra_info": {"seed": seed + place}} for place in range(size)]
