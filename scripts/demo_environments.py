"""The environments of the agent demos: a number to guess, and a calculator."""

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


class Calculator:
    """Sums of four digits. A turn in parentheses is a call, which is answered with the sum; another one is the answer.

    `environment/calls/mean` counts the calls of an episode.
    """

    def reset(self, row: dict) -> None:
        """row: its ground truth is the sum, in five digits."""
        self.sum = row["ground_truth"]

    def step(self, turn):
        """1.0 for the right sum."""
        from megatron_rl.agents.observation import Observation

        call = re.fullmatch(r"\((\d{4})\+(\d{4})\)", turn.text)
        if call is None:
            return None, float(turn.text == self.sum), True
        total = f"{int(call[1]) + int(call[2]):05d}"
        return Observation(({"role": "tool", "content": total},), counts={"calls": 1.0})
