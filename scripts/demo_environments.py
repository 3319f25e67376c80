"""The environment of an agent demo: a number to guess."""

from __future__ import annotations

import re

NUM_GUESSES = 5


class Guess:
    """A number from 0 to 15 is guessed within five turns; ">" says that it is higher, "<" that it is lower."""

    def reset(self, row: dict) -> None:
        """row: its ground truth is the number."""
        self.number, self.left = int(row["ground_truth"]), NUM_GUESSES

    def step(self, turn) -> tuple[str | None, float, bool]:
        """1.0 for the number; what is no number from 0 to 15 ends the episode."""
        self.left -= 1
        if re.fullmatch("[0-9]|1[0-5]", turn.text) is None:
            return None, 0.0, True
        guess = int(turn.text)
        if guess == self.number or not self.left:
            return None, float(guess == self.number), True
        return ">" if guess < self.number else "<", 0.0, False
