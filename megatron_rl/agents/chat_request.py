"""What an agent asks its policy, whatever its protocol, and what a protocol has to offer. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.agents.image_parts import Images, content_of
from megatron_rl.agents.observation import FOLLOWING, InitialConversation, Message, Turn, TurnOptions
from megatron_rl.agents.request_fields import check_fields

Content = dict[str, Any]

MODEL = "policy"
"""The name under which the policy replies; an agent may ask for any."""


@dataclass(frozen=True)
class ChatRequest:
    """A whole conversation and the agent's tools, in the form of chat templates. with_usage: a stream ends with it.
    options: of the response.
    """

    messages: tuple[Message, ...]
    tools: tuple[Content, ...] = ()
    streams: bool = False
    with_usage: bool = False
    options: TurnOptions = TurnOptions()

    @property
    def opening(self) -> InitialConversation:
        """The conversation as the beginning of an episode, or of a part of it."""
        return InitialConversation(self.messages, self.tools, self.options)

    def after(self, before: ChatRequest, turn: Turn) -> tuple[Message, ...]:
        """Return the messages that follow `before` and the policy's turn; none where this is another conversation."""
        known = (*before.messages, turn.as_message())
        new = self.messages[len(known) :]
        goes_on = self.tools == before.tools and self.messages[: len(known)] == known
        return new if goes_on and all(message["role"] in FOLLOWING for message in new) else ()


class OutOfTokensError(Exception):
    """The episode has no tokens or turns left."""


NO_TOKENS_LEFT = "the episode has no tokens or turns left"


class ChatProtocol(Protocol):
    """A protocol between agents and models. path: of its requests, below the server."""

    path: str

    def read(self, body: Any, images: Images | None = None) -> ChatRequest:
        """Read a request. images: gets those that it shows; None: it may show none. Raises ValueError, with the rule,
        for one that cannot be answered.
        """

    def answer(self, turn: Turn, number: int) -> Content:
        """Return the policy's turn as the body of a reply. number: of the reply in its session."""

    def stream(self, turn: Turn, number: int, request: ChatRequest) -> list[str]:
        """Return the policy's turn as server-sent events."""

    def refusal(self, reason: str, kind: str) -> Content:
        """Return the body of an error."""

    def too_long(self, num_tokens: int) -> Content:
        """Return the body of the error of a conversation that has no tokens left. num_tokens: that it may have."""


def object_with_messages(body: Any) -> Content:
    """Return the body of a request that has messages. Raises ValueError for others, and as `check_fields`."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ValueError("a request must be an object with a list of messages")
    check_fields(body)
    return body


def asked_tokens(*sent: Any) -> int | None:
    """Return the first of these limits that is a number of tokens; None without one."""
    return next((limit for limit in sent if type(limit) is int and limit > 0), None)


def known_tools(sent: Any) -> tuple[Content, ...]:
    """Return the tools of a request, which chat templates and parsers of calls can read. Raises ValueError."""
    tools = sent or []
    if not isinstance(tools, list):
        raise ValueError(f"tools must be a list; it is {tools!r:.80}")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        fields = function if isinstance(function, dict) else {}
        is_known = isinstance(fields.get("name"), str) and tool.get("type", "function") == "function"
        is_known &= isinstance(fields.get("description"), str | None)
        if not is_known or not isinstance(fields.get("parameters"), dict | None):
            form = '{"type": "function", "function": {"name": TEXT, "description": TEXT, "parameters": OBJECT}}'
            raise ValueError(f"tools[{place}] must be {form}, where only name is required; it is {tool!r:.80}")
    return tuple(tools)


def one_text(name: str, content: Any) -> str:
    """Return a content as one text: a text, nothing, or parts of text. name: of the field, for the ValueError that
    others raise.
    """
    text = content_of(name, content, None)
    assert isinstance(text, str)  # without images it is one
    return text


def named_results(messages: Iterable[Message], calls: Iterable[Mapping[str, str]]) -> tuple[Message, ...]:
    """Return messages in which each result of a tool has the name of the call that it answers, where the call is known.

    calls: of each message, in order, those that it makes: id -> name.
    """
    names: dict[str, str] = {}
    named = []
    for message, own in zip(messages, calls, strict=True):
        names |= own
        name = names.get(str(message.get("tool_call_id"))) if message["role"] == "tool" else None
        named.append(message | {"name": name} if name and "name" not in message else message)
    return tuple(named)
