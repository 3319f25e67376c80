"""Turns and their answers as JSON values, between processes, in schedules and in checkpoints. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.agents.observation import (
    FAILURES,
    EpisodeFailure,
    InitialConversation,
    Observation,
    ToolCall,
    Turn,
    TurnOptions,
    is_message,
    opening_of,
)
from megatron_rl.plain_values import describe_error, finite_number, plain_json, plain_text

Answer = Observation | InitialConversation | EpisodeFailure
LATER_FIELDS = ("num_tokens", "num_context", "reasoning_content", "is_cut")
"""Fields of a turn that an older run has not written."""
Played = tuple[Turn, Observation]
"""A turn with its response."""


@dataclass(frozen=True)
class WithImages:
    """A response with images that its messages show, which were not sent before. images: key -> image in base64."""

    answer: Answer
    images: dict[str, str]


def as_json(answer: Answer | WithImages) -> Any:
    """Return a response as JSON values."""
    return asdict(answer)


def from_json(content: Any) -> Answer | WithImages:
    """Return the response of `as_json`. Raises ValueError for anything else."""
    if not (isinstance(content, dict) and content.keys() == {"answer", "images"}):
        return answer_from_json(content)
    images = content["images"]
    if not isinstance(images, dict) or not all(isinstance(image, str) for image in images.values()):
        raise ValueError("images of a response must be texts by key")
    return WithImages(answer_from_json(content["answer"]), images)


def turn_from_json(content: dict[str, Any]) -> Turn:
    """Return the turn of `dataclasses.asdict`."""
    later = {name: content[name] for name in LATER_FIELDS if name in content}
    later["drawn"] = tuple((text, log_prob) for text, log_prob in content.get("drawn", ()))
    return Turn(content["text"], tuple(ToolCall(**call) for call in content["calls"]), content["problem"], **later)


def answer_from_json(content: Any) -> Answer:
    """Return the response of `dataclasses.asdict`. Raises ValueError for anything else."""
    try:
        if content.keys() == {"cause", "reason"} and content["cause"] in FAILURES:
            return EpisodeFailure(content["cause"], str(content["reason"]))
        # An older run wrote `max_tokens` here, and did not keep it.
        if content.keys() - {"max_tokens", "options"} == {"messages", "tools"}:
            return _opening(content)
        messages, reward, is_done, counts = (content[name] for name in ("messages", "reward", "is_done", "counts"))
        is_valid = isinstance(is_done, bool) and type(reward) is float and all(map(is_message, messages))
        if is_valid and all(finite_number(value) is not None for value in counts.values()):
            anew = content.get("anew")
            again = None if anew is None else _opening(anew)
            is_unread = content.get("is_unread", False) is True
            return Observation(tuple(messages), reward, is_done, counts, again, _options(content), is_unread)
    except (KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{content!r:.80}")


def plain_answer(answer: Answer) -> Answer:
    """Return a response as the driver reads it: its values are JSON's own. One that has others is a failed episode."""
    if isinstance(answer, EpisodeFailure):
        cause = answer.cause if answer.cause in FAILURES else "raised"
        return EpisodeFailure(cause, plain_text(answer.reason))
    try:
        return answer_from_json(plain_json(asdict(answer)))
    except RecursionError:
        reason = "it is nested too deeply"
    except Exception as error:  # copying an object of the user's may raise anything
        reason = str(error) if isinstance(error, ValueError) else describe_error(error)
    return EpisodeFailure(
        "no_answer", f"the observation of the environment cannot be sent as JSON: {plain_text(reason)}"
    )


def _opening(content: dict[str, Any]) -> InitialConversation:
    messages, tools = tuple(content["messages"]), tuple(content["tools"])
    return opening_of(InitialConversation(messages, tools, _options(content)))


def _options(content: dict[str, Any]) -> TurnOptions:
    """Raises TypeError for other fields."""
    options = TurnOptions(**content.get("options", {}))
    limit = options.max_tokens
    if limit is not None and (type(limit) is not int or limit < 1):
        raise TypeError(f"max_tokens={limit!r:.80}")
    return options


@dataclass(frozen=True)
class EpisodeRecord:
    """What a checkpoint keeps of an episode next to its tokens. turns: with their responses. failure: why it failed.

    opening: how it began, with `prompt_ids` in place of the dataset's; None where it began with the dataset's prompt.
    starts: the tokens after the prompt with which conversations begin again. num_retries: how often it was generated
    again because it had failed.
    """

    turns: Sequence[Played] = ()
    failure: EpisodeFailure | None = None
    opening: InitialConversation | EpisodeFailure | None = None
    prompt_ids: tuple[int, ...] = ()
    starts: Sequence[int] = ()
    num_retries: int = 0


def records_as_json(records: Mapping[int, EpisodeRecord]) -> str:
    """Return JSON of the records of episodes by their numbers."""
    content = {
        number: [
            [[asdict(turn), asdict(answer)] for turn, answer in record.turns],
            record.failure and asdict(record.failure),
            record.opening and asdict(record.opening),
            record.prompt_ids,
            list(record.starts),
            record.num_retries,
        ]
        for number, record in records.items()
    }
    return json.dumps(content)


def records_from_json(content: bytes) -> dict[int, EpisodeRecord]:
    """Return what `records_as_json` was given. Raises ValueError, KeyError, TypeError for anything else."""
    records: dict[int, EpisodeRecord] = {}
    for number, (turns, failed, *more) in json.loads(content).items():
        began, prompt_ids, starts, num_retries = more or (None, (), (), 0)
        answers = [(turn_from_json(turn), answer_from_json(answer)) for turn, answer in turns]
        known = [(turn, answer) for turn, answer in answers if isinstance(answer, Observation)]
        failure = None if failed is None else answer_from_json(failed)
        opening = None if began is None else answer_from_json(began)
        if (
            len(known) < len(answers)
            or isinstance(failure, Observation | InitialConversation)
            or isinstance(opening, Observation)
        ):
            raise ValueError(f"the turns of episode {number} do not have the form that a run writes")
        records[int(number)] = EpisodeRecord(known, failure, opening, tuple(prompt_ids), starts, num_retries)
    return records
