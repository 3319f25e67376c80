"""Environments: what the policy meets between two of its turns. No torch.

An environment is a class in a file of the user's:

    class Guess:
        def reset(self, row):           # row: data_source, ground_truth, extra_info, index, sample
            self.number = int(row["ground_truth"])

        def step(self, turn):           # turn: a `Turn`, what the policy has said
            return "higher", 0.0, False  # observation, reward, done

The observation is a text, a list of messages, or None. The content of a message is a text, or a list of parts of
which some are images (`image_parts`), where the run reads images. Both methods may be async. A method `opening` returns
the conversation with which the episode begins, in place of the dataset's prompt. A method `cut` gets the turn at which
an episode has run out of tokens or turns, and returns its reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megatron_rl.agents.image_parts import Images, content_of, is_content
from megatron_rl.plain_values import finite_number, quote

Message = dict[str, Any]
TaskRow = Mapping[str, Any]
"""A row of the dataset: data_source, ground_truth, extra_info, index, and sample, the number among its group."""

FAILURES = ("raised", "timed_out", "crashed", "no_answer", "not_repeatable")
"""Why an episode failed. no_answer: `step` returned something else. not_repeatable: played again, it differed."""
FOLLOWING = ("user", "tool", "system")
"""Roles of messages that may follow a turn of the policy."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy has written: the tool's name and its arguments."""

    name: str
    arguments: dict[str, Any]


DrawnToken = tuple[str, float]
"""Text and log-prob of a sampled token."""


@dataclass(frozen=True)
class Turn:
    """One turn of the policy. text: without special tokens, calls and, where the chat template knows thoughts, without
    the thought, which is `reasoning_content`. calls: the tool calls in it, in order; none is read inside of a thought.

    problem: why a call in it cannot be read; "" if none fails to be. num_tokens: of the turn; num_context: before it.
    drawn: its tokens, if an agent asked for log-probs. is_cut: it ended at a limit of tokens. A turn that is cut and
    has no tokens could not begin: the episode has no tokens or turns left.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""
    num_tokens: int = 0
    num_context: int = 0
    reasoning_content: str = ""
    is_cut: bool = False
    drawn: tuple[DrawnToken, ...] = ()

    def as_message(self) -> Message:
        """Return it as a message, in the form of chat templates."""
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in self.calls
        ]
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        return message | {"tool_calls": calls} if calls else message


@dataclass(frozen=True)
class TurnOptions:
    """Options of the policy's next turn, as an agent sets them. max_tokens: its limit, None: the episode's alone.
    with_log_probs: `Turn.drawn`. is_text: calls in it are not read.
    """

    max_tokens: int | None = None
    with_log_probs: bool = False
    is_text: bool = False


@dataclass(frozen=True)
class InitialConversation:
    """A conversation up to the policy's next turn. tools: schemas of tools that the chat template is given. options: of
    that turn.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    options: TurnOptions = TurnOptions()


Opening = InitialConversation
"""The name that it had, which users' environments may import."""


@dataclass(frozen=True)
class Observation:
    """The answer to a turn. messages: what the policy reads next. is_done: the episode ends, and no message is read.

    reward: of this turn; rewards of an episode are added up. counts: numbers to log, summed over an episode.
    again: a conversation that begins here; the policy reads this, and neither messages nor what came before. options:
    of the next turn, where the conversation continues. is_unread: the turn had no reader, as an agent has cancelled its
    request; its tokens are context that is not trained.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    is_done: bool = False
    counts: dict[str, float] = field(default_factory=dict)
    anew: InitialConversation | None = None
    options: TurnOptions = TurnOptions()
    is_unread: bool = False

    @property
    def next_options(self) -> TurnOptions:
        """Options of the policy's next turn."""
        return self.options if self.anew is None else self.anew.options


@dataclass(frozen=True)
class EpisodeFailure:
    """An episode cannot continue. cause: one of `FAILURES`."""

    cause: str
    reason: str


class EpisodeError(Exception):
    """An environment cannot continue with its episode. cause: one of `FAILURES`."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


class Environment(Protocol):
    """What the user's class has. One object plays one episode."""

    def reset(self, row: TaskRow) -> Any:
        """Prepare for the task of a row."""

    def step(self, turn: Turn) -> Any:
        """Answer a turn: observation, reward, done; or an `Observation`."""


@dataclass(frozen=True)
class TextLimit:
    """longest: characters of one message of an observation. cut: where a longer one loses some: "left" keeps its
    start, "right" its end, "middle" both.
    """

    longest: int
    cut: str = "middle"

    def applied(self, message: Message) -> Message:
        """Return the message with texts that are not too long, but for a mark where one was cut."""
        content = message["content"]
        if isinstance(content, str):
            return message if len(content) <= self.longest else message | {"content": self._cut(content)}
        parts = [part | {"text": self._cut(part["text"])} if part["type"] == "text" else part for part in content]
        return message | {"content": parts}

    def _cut(self, text: str) -> str:
        longest, mark = self.longest, "...(truncated)..."
        if len(text) <= longest:
            return text
        match self.cut:
            case "left":
                return text[:longest] + mark
            case "right":
                return mark + text[-longest:]
        return text[: longest // 2] + mark + text[len(text) - longest // 2 :]


def observation_of(value: Any, limit: TextLimit, images: Images | None = None) -> Observation:
    """Return what `step` has returned, checked and within the limit. images: gets those that it shows; None: it may
    show none. Raises ValueError, with the rule, for others.
    """
    counts: dict[str, Any] = {}
    anew: InitialConversation | None = None
    options, is_unread = TurnOptions(), False
    if isinstance(value, Observation):
        counts, options, is_unread = value.counts, value.options, value.is_unread
        anew = None if value.anew is None else opening_of(value.anew, images)
        value = (value.messages, value.reward, value.is_done)
    if not isinstance(value, tuple) or len(value) != 3:
        raise ValueError(f"step must return (observation, reward, done) or an Observation; it returned {quote(value)}")
    said, reward, is_done = value
    given = [("the reward", reward), *((f"the count {name}", number) for name, number in counts.items())]
    numbers = [finite_number(number) for _, number in given]
    for (what, sent), number in zip(given, numbers, strict=True):
        if number is None:
            raise ValueError(f"{what} of a step must be a finite number; it is {quote(sent)}")
    if not isinstance(is_done, bool):
        raise ValueError(f"done must be True or False; it is {quote(is_done)}")
    earned, *counted = (number for number in numbers if number is not None)
    messages = tuple(map(limit.applied, messages_of(said, images)))
    return Observation(messages, earned, is_done, dict(zip(counts, counted, strict=True)), anew, options, is_unread)


def messages_of(said: Any, images: Images | None = None) -> tuple[Message, ...]:
    """Return an observation as messages: a text is one message of the user. images: as `observation_of`. Raises
    ValueError for anything else.
    """
    if said is None:
        return ()
    if isinstance(said, str):
        return ({"role": "user", "content": said},)
    if isinstance(said, Sequence) and all(map(is_message, plain := [_with_parts(each, images) for each in said])):
        return tuple(
            {str(name): value if name == "content" else str(value) for name, value in message.items()}
            for message in plain
        )
    raise ValueError(
        "an observation must be a text, None, or messages with role user, tool or system and a text or parts as "
        f"content; it is {quote(said)}"
    )


def messages_of_prompt(prompt: Any) -> tuple[Message, ...]:
    """Return a prompt of the dataset as messages: a text is one message of the user, None is none."""
    return tuple(prompt or ()) if not isinstance(prompt, str) else ({"role": "user", "content": prompt},)


def opening_of(value: Any, images: Images | None = None) -> InitialConversation:
    """Return what `opening` has returned, checked: a text is one message of the user. images: as `observation_of`.
    Raises ValueError for others.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    opening = (
        value
        if isinstance(value, InitialConversation)
        else InitialConversation(tuple(value) if isinstance(value, list) else ())
    )
    messages = tuple(_with_parts(message, images) for message in opening.messages)
    if messages and all(is_message(message, (*FOLLOWING, "assistant")) for message in messages):
        return replace(opening, messages=messages)
    raise ValueError(f"opening must return a text, or a list of messages; it returned {quote(value)}")


def _with_parts(message: Any, images: Images | None) -> Any:
    """Return a message whose content is a list of parts in the form of chat templates; others as they are."""
    if (
        not isinstance(message, Mapping)
        or not isinstance(message.get("content"), list)
        or is_content(message["content"])
    ):
        return message
    return {**message, "content": content_of("the content of a message", message["content"], images)}


def is_message(value: Any, roles: Collection[str] = FOLLOWING) -> bool:
    """Return whether a value is a message of one of these roles, with a text or parts as content."""
    return isinstance(value, Mapping) and value.get("role") in roles and is_content(value.get("content"))


async def settled(value: Any) -> Any:
    """Return a value, or what an awaitable gives."""
    return await value if inspect.isawaitable(value) else value
