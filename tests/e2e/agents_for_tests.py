"""Environments of whole runs on the addition demo: try again, be late, fail, answer otherwise each time."""

from __future__ import annotations

import os
import random
import time


class Retry:
    """A wrong sum is asked for again; each further turn costs a tenth."""

    def reset(self, row: dict) -> None:
        self.sum = row["ground_truth"]

    def step(self, turn):
        if turn.text == self.sum:
            return None, 1.0, True
        return "no=", -0.1, False


class Late(Retry):
    """As long as chance says."""

    def step(self, turn):
        time.sleep(random.random() / 50)
        return super().step(turn)


class Forbidden:
    """No environment may run."""

    def reset(self, row: dict) -> None:
        os._exit(9)

    def step(self, turn):
        os._exit(9)


class Fails(Retry):
    """One prompt in `every` ends its process, another raises."""

    def __init__(self, every: int = 16) -> None:
        self.every = every

    def reset(self, row: dict) -> None:
        super().reset(row)
        self.index = row["index"]

    def step(self, turn):
        if self.index % self.every == 1:
            os._exit(3)
        if self.index % self.every == 2:
            raise ValueError("no more")
        return super().step(turn)


class Changes(Retry):
    """No process says the same as another."""

    def step(self, turn):
        said, reward, is_done = super().step(turn)
        return said and f"{os.getpid() % 10}=", reward, is_done
