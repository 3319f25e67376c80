"""A server of OpenEnv's own package with the guessing game: `python openenv_guess.py PORT`. Not of the run."""

from __future__ import annotations

import re
import sys

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    """What the policy says."""

    message: str


class Seen(Observation):
    """What it reads."""

    text: str = ""


class Guess(Environment):
    """A number from 0 to 15, the seed's, in five guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.left = 0, 5

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: object) -> Seen:
        self.number, self.left = (seed or 0) % 16, 5
        return Seen(text="0-15?")

    def step(self, action: Said, timeout_s: float | None = None, **more: object) -> Seen:
        self.left -= 1
        guess = int(action.message) if re.fullmatch("[0-9]|1[0-5]", action.message) else None
        is_done = guess is None or guess == self.number or not self.left
        text = "" if is_done else ">" if guess < self.number else "<"
        return Seen(text=text, done=is_done, reward=float(guess == self.number))

    @property
    def state(self) -> State:
        return State(step_count=5 - self.left)


if __name__ == "__main__":
    app = create_fastapi_app(Guess, Said, Seen, max_concurrent_envs=1024)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
