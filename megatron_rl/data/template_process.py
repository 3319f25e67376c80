"""Chat templates: programs that come with a model, rendered in a process of their own that may be killed.

A template may raise anything, loop for ever or take all memory, and may do so for one conversation alone. transformers
renders it in the calling process, where one product of numbers or texts can be neither interrupted nor bounded. So a
child with limits of CPU time and memory is forked, and returns the texts.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import signal
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Generic, TypeVar

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_rl.cluster.channel import Channel
from megatron_rl.cluster.child_processes import ForkedChild, how_ended
from megatron_rl.data.message_form import Message, MessageForm, is_plain
from megatron_rl.errors import ConfigError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

RAISED = (
    *(jinja2.TemplateError, SyntaxError, AssertionError, AttributeError, TypeError, ValueError),
    *(ArithmeticError, LookupError, RuntimeError, OSError),
)
"""The errors of templates: their own refusals, expressions that meet values they were not written for, endless
recursion, and Python's error for a template that is nested too deeply.
"""
LONGEST_TEXT = 1 << 24
"""Most characters of one rendered conversation; more would take a tokenizer minutes."""
AT_ONCE = 256
"""Conversations that are sent to the child together."""
PATIENCE = 60
"""Seconds of waiting for each second of CPU time that is allowed."""
OUT_OF_MEMORY = 3
"""Exit code of a child that reached its memory limit."""


class TemplateRefusal(Exception):
    """A template does not render a conversation; the message says why. number: the place of that conversation."""

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class RenderLimits:
    """Limits of the child. cpu_s: seconds of CPU time for one conversation, and for `AT_ONCE` of them; if these take
    longer, they are rendered one by one. memory_bytes: beyond the memory of the parent at the fork.
    """

    cpu_s: float = 5.0
    memory_bytes: int = 2 << 30


LIMITS = RenderLimits()


def refusable(render: Callable[[], Answer]) -> Answer:
    """The result of `render`. Raises TemplateRefusal for an error of a template."""
    try:
        return render()
    except RAISED as error:
        is_its_own = type(error) is jinja2.TemplateError  # raise_exception; the template wrote the text
        raise TemplateRefusal((str(error) if is_its_own else f"{type(error).__name__}: {error}")[:200]) from None


def checked_length(text: str) -> str:
    """The text itself. Raises TemplateRefusal if it is too long for a conversation."""
    if len(text) > LONGEST_TEXT:
        raise TemplateRefusal(f"it makes {len(text)} characters of one conversation, and may make {LONGEST_TEXT}")
    return text


def template_of(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The chat template of a tokenizer, and the variables that are the template's. `chat_template` among the variables
    is another template, or the name of one of several.

    Raises ConfigError where the tokenizer has no such template, and for what is neither a template nor a name.
    """
    own = dict(variables)
    given, tools = own.pop("chat_template", None), own.get("tools")
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    is_known = given is None or (isinstance(given, str) and (given in named or "{" in given))
    if not is_known:  # a text without a brace would be all that is written, whatever the messages say
        names = f": {', '.join(sorted(named))}" if named else ", which has no names"
        rule = f"must be a template, or the name of one of the tokenizer's{names}"
        raise ConfigError(f"data.apply_chat_template_kwargs.chat_template={given!r:.80} {rule}; try: null")
    try:
        return tokenizer.get_chat_template(given, tools), own
    except ValueError as error:
        if not named:
            raise ConfigError(f"the tokenizer has no chat_template: {error}") from None
        names = ", ".join(sorted(named))
        raise ConfigError(
            f"the tokenizer has the chat templates {names}, and none of them is the default; "
            f"try: data.apply_chat_template_kwargs.chat_template={min(named)}"
        ) from None


@lru_cache(maxsize=16)
def _form(template: str, variables: str) -> MessageForm:
    """The form in which a template takes messages; variables: as JSON."""
    known = {**json.loads(variables), "add_generation_prompt": False, "return_assistant_tokens_mask": False}

    def render(messages: list[Message]) -> str | None:
        try:
            texts, _ = refusable(
                lambda: render_jinja_template(conversations=[messages], chat_template=template, **known)
            )
        except TemplateRefusal:
            return None
        text: str = texts[0]
        return text

    return MessageForm.probed(template, render)


def form_of(template: str, variables: Mapping[str, Any]) -> MessageForm:
    """The form in which a template takes thoughts and calls. variables: as `rendered`."""
    return _form(template, json.dumps(dict(variables), sort_keys=True, default=str))


def adapted(template: str, variables: Mapping[str, Any], messages: Sequence[Message]) -> list[Message]:
    """Messages in the form that a template takes. Raises ValueError as `MessageForm.adapted`."""
    return list(messages) if is_plain(messages) else form_of(template, variables).adapted(messages)


def rendered(template: str, variables: Mapping[str, Any], chats: Sequence[Any]) -> list[str | TemplateRefusal]:
    """The text or the refusal of each conversation. variables: of the template, and arguments of its renderer."""

    def render() -> Any:
        known = [adapted(template, variables, chat) for chat in chats]
        return render_jinja_template(conversations=known, chat_template=template, **variables)

    try:
        texts, _ = refusable(render)
        return [checked_length(text) for text in texts]
    except TemplateRefusal as refusal:
        if len(chats) == 1:
            return [refusal]
        return [text for chat in chats for text in rendered(template, variables, [chat])]


class TemplateProcess(Generic[Item, Answer]):
    """Calls a function on conversations in a child process. The child is forked at the first call and ends with this
    object.
    """

    def __init__(self, function: Callable[[Sequence[Item]], list[Answer]], limits: RenderLimits | None = None) -> None:
        """function: returns one answer for each item, which is pickled; an error that it raises is a bug."""
        self._function, self._limits = function, limits or LIMITS
        self._channel: Channel | None = None
        self._finalizer: weakref.finalize[..., TemplateProcess[Item, Answer]] | None = None

    def map(self, items: Sequence[Item]) -> list[Answer]:
        """One answer for each item, in order. Raises TemplateRefusal if an item alone takes more than the limits."""
        starts = range(0, len(items), AT_ONCE)
        return [answer for start in starts for answer in self._some(items[start : start + AT_ONCE], start)]

    def close(self) -> None:
        """End the child, if there is one; the next call forks another."""
        if self._finalizer is not None:
            self._finalizer()
        self._channel = None

    def _some(self, items: Sequence[Item], first: int) -> list[Answer]:
        """The answers for some items. first: the number of the first one."""
        try:
            return self._ask(items)
        except TemplateRefusal as refusal:
            if len(items) == 1:
                raise TemplateRefusal(str(refusal), first) from None
        # Either one item alone takes too much, or all together do.
        return [answer for number, item in enumerate(items, start=first) for answer in self._some([item], number)]

    def _ask(self, items: Sequence[Item]) -> list[Answer]:
        if self._channel is None:
            self._channel = self._start()
        try:
            self._channel.send(pickle.dumps(items))
            reply = self._channel.receive_within(PATIENCE * self._limits.cpu_s)  # a child that sleeps uses no CPU time
            if reply is None:
                self.close()
                raise TemplateRefusal(f"there is no text after {PATIENCE * self._limits.cpu_s:g} s")
            answers: list[Answer] = pickle.loads(reply)
            return answers
        except RecursionError:
            raise TemplateRefusal("it is nested more deeply than can be handed over") from None
        except EOFError:
            raise TemplateRefusal(self._reason()) from None

    def _start(self) -> Channel:
        child = ForkedChild.start(self._serve)
        self._finalizer = weakref.finalize(self, _end, child, os.getpid())
        return child.channel

    def _serve(self, channel: Channel) -> None:
        """Run as the child: receive lists of items, send lists of responses."""
        try:
            self._be_bounded()
            gc.freeze()  # collecting the parent's objects would copy their pages
            while True:
                items = pickle.loads(channel.receive())
                signal.setitimer(signal.ITIMER_PROF, self._limits.cpu_s)
                answers = self._function(items)
                signal.setitimer(signal.ITIMER_PROF, 0)
                channel.send_whole(pickle.dumps(answers))
        except EOFError:
            return
        except MemoryError:
            os._exit(OUT_OF_MEMORY)

    def _be_bounded(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the parent handles them and ends this process
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * PAGESIZE + self._limits.memory_bytes
        given, _ = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if given == resource.RLIM_INFINITY else min(limit, given)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def _reason(self) -> str:
        """The cause of the child's end, in words. The next call forks another child."""
        assert self._finalizer is not None
        status, self._channel = self._finalizer(), None
        if status == -signal.SIGPROF:
            return f"it does not end within {self._limits.cpu_s:g} s of CPU time"
        if status == OUT_OF_MEMORY:
            return f"it takes more than {self._limits.memory_bytes / 1e9:.1f} GB of memory"
        return f"its process {'has ended' if status is None else how_ended(status)}"


def _end(child: ForkedChild, parent: int) -> int | None:
    """Kill the child if it still runs. Returns its exit code, negative for a signal; None: it is not known here."""
    with suppress(ChildProcessError):
        if os.getpid() == parent:  # no copy of the object in another child
            return child.end()
    return None


class Renderer:
    """Renders with the chat template of a tokenizer, in a child process. options: of `apply_chat_template`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], limits: RenderLimits | None = None
    ) -> None:
        self._tokenizer, self._options, self._limits = tokenizer, options, limits
        self._process: TemplateProcess[Any, str | TemplateRefusal] | None = None

    def texts(self, chats: Sequence[Any]) -> list[str]:
        """The text of each conversation. Raises TemplateRefusal for the first that is refused."""
        if self._process is None:
            variables = {**self._tokenizer.special_tokens_map, **self._options}
            template, variables = template_of(self._tokenizer, variables)
            self._process = TemplateProcess(partial(rendered, template, variables), self._limits)
        texts = []
        for number, text in enumerate(self._process.map(chats)):
            if isinstance(text, TemplateRefusal):
                raise TemplateRefusal(str(text), number)
            texts.append(text)
        return texts

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.close()
