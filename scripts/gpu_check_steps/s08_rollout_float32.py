"""Rounds of entering and leaving with vLLM in 32 bits: greedy tokens, and log-probs compared with the trainer's."""

from __future__ import annotations

from typing import Any

import step_outcome
from rollouts import rounds


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """See `rounds`."""
    rounds(device, small, "float32", figures)


if __name__ == "__main__":
    step_outcome.main(run)
