"""Turns and their answers as JSON values, between processes, in schedules and in checkpoints. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_rl.agents.observation import FAILURES, EpisodeFailure, Observation, ToolCall, Turn, is_message
from megatron_rl.plain_values import finite_number

Answer = Observation | EpisodeFailure
Played = tuple[Turn, Observation]
"""A turn with its answer."""


def turn_from_json(content: dict[str, Any]) -> Turn:
    """Return the turn of `dataclasses.asdict`."""
    return Turn(content["text"], tuple(ToolCall(**call) for call in content["calls"]), content["problem"])


def answer_from_json(content: Any) -> Answer:
    """Return the answer of `dataclasses.asdict`. Raises ValueError for anything else."""
    try:
        if content.keys() == {"cause", "reason"} and content["cause"] in FAILURES:
            return EpisodeFailure(content["cause"], str(content["reason"]))
        messages, reward, is_done, counts = (content[name] for name in ("messages", "reward", "is_done", "counts"))
        is_valid = isinstance(is_done, bool) and type(reward) is float and all(map(is_message, messages))
        if is_valid and all(finite_number(value) is not None for value in counts.values()):
            return Observation(tuple(messages), reward, is_done, counts)
    except (KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{content!r:.80}")


def played_as_json(played: Mapping[int, tuple[list[Played], EpisodeFailure | None]]) -> str:
    """Return JSON of episode -> its turns with their answers, and why it failed or None."""
    content = {
        number: [[[asdict(turn), asdict(answer)] for turn, answer in turns], failure and asdict(failure)]
        for number, (turns, failure) in played.items()
    }
    return json.dumps(content)


def played_from_json(content: bytes) -> dict[int, tuple[list[Played], EpisodeFailure | None]]:
    """Return what `played_as_json` was given. Raises ValueError, KeyError, TypeError for anything else."""
    played: dict[int, tuple[list[Played], EpisodeFailure | None]] = {}
    for number, (turns, failed) in json.loads(content).items():
        answers = [(turn_from_json(turn), answer_from_json(answer)) for turn, answer in turns]
        known = [(turn, answer) for turn, answer in answers if isinstance(answer, Observation)]
        failure = None if failed is None else answer_from_json(failed)
        if isinstance(failure, Observation) or len(known) < len(answers):
            raise ValueError(f"the turns of episode {number} are not what a run writes")
        played[int(number)] = known, failure
    return played
