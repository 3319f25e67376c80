"""Chat templates: programs that come with a model, rendered in a process of their own that may be killed.

A template may raise anything, loop for ever or take all memory, and may do so for one conversation alone. transformers
renders it in the process that calls it, where one product of numbers or texts can be neither interrupted nor bounded.
So a child is forked, which has limits of CPU time and of memory, and answers with texts.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from mmap import PAGESIZE
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

Item = TypeVar("Item")
Answer = TypeVar("Answer")

RAISED = (
    *(jinja2.TemplateError, SyntaxError, AssertionError, AttributeError, TypeError, ValueError),
    *(ArithmeticError, LookupError, RuntimeError, OSError),
)
"""What a template raises: its own refusals, what its expressions do with values they were not written for, endless
recursion, and what Python says of a template that is nested too deeply.
"""
LONGEST_TEXT = 1 << 24
"""Characters that one conversation may become; more would take a tokenizer minutes."""
AT_ONCE = 256
"""Conversations that are handed to the child together."""
PATIENCE = 60
"""Seconds that are waited for each second of CPU time that is allowed."""
PR_SET_PDEATHSIG = 1
OUT_OF_MEMORY = 3
"""Exit code of a child whose memory was not enough."""


class TemplateRefusal(Exception):
    """A template does not render a conversation; the message says why. number: of it, among those that were given."""

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class RenderLimits:
    """cpu_s: seconds of CPU time for one conversation, and for `AT_ONCE`, which are else rendered one by one.
    memory_bytes: what the child may have beside what its parent has when it forks.
    """

    cpu_s: float = 5.0
    memory_bytes: int = 2 << 30


LIMITS = RenderLimits()


def refusable(render: Callable[[], Answer]) -> Answer:
    """What `render` returns. Raises TemplateRefusal for what a template raises."""
    try:
        return render()
    except RAISED as error:
        is_its_own = type(error) is jinja2.TemplateError  # of raise_exception, whose text is the template's
        raise TemplateRefusal((str(error) if is_its_own else f"{type(error).__name__}: {error}")[:200]) from None


def checked_length(text: str) -> str:
    """The text. Raises TemplateRefusal where it is too long for a conversation."""
    if len(text) > LONGEST_TEXT:
        raise TemplateRefusal(f"it makes {len(text)} characters of one conversation, and may make {LONGEST_TEXT}")
    return text


def rendered(template: str, variables: Mapping[str, Any], chats: Sequence[Any]) -> list[str | TemplateRefusal]:
    """The text of each conversation, or why there is none. variables: of the template, and its renderer's arguments."""
    try:
        texts, _ = refusable(lambda: render_jinja_template(conversations=chats, chat_template=template, **variables))
        return [checked_length(text) for text in texts]
    except TemplateRefusal as refusal:
        if len(chats) == 1:
            return [refusal]
        return [one for chat in chats for one in rendered(template, variables, [chat])]


class TemplateProcess(Generic[Item, Answer]):
    """Calls a function of conversations in a child, which is forked at the first call and ends with this object."""

    def __init__(self, function: Callable[[Sequence[Item]], list[Answer]], limits: RenderLimits | None = None) -> None:
        """function: one answer for each item; answers are pickled, and what it raises is a fault of this program."""
        self._function, self._limits = function, limits or LIMITS
        self._connection: Connection | None = None
        self._finalizer: weakref.finalize[..., TemplateProcess[Item, Answer]] | None = None

    def map(self, items: Sequence[Item]) -> list[Answer]:
        """One answer for each item, in order. Raises TemplateRefusal where one takes more than the limits, alone."""
        return [
            one for first in range(0, len(items), AT_ONCE) for one in self._some(items[first : first + AT_ONCE], first)
        ]

    def close(self) -> None:
        """End the child, if there is one; the next call forks another."""
        if self._finalizer is not None:
            self._finalizer()
        self._connection = None

    def _some(self, items: Sequence[Item], first: int) -> list[Answer]:
        """Of items the first of which has this number."""
        try:
            return self._ask(items)
        except TemplateRefusal as refusal:
            if len(items) == 1:
                raise TemplateRefusal(str(refusal), first) from None
        # One of them is to blame, or they are too much together.
        return [one for number, item in enumerate(items, start=first) for one in self._some([item], number)]

    def _ask(self, items: Sequence[Item]) -> list[Answer]:
        if self._connection is None:
            self._connection = self._start()
        try:
            self._connection.send(items)
            if not self._connection.poll(PATIENCE * self._limits.cpu_s):  # a child that stands still has no CPU time
                self.close()
                raise TemplateRefusal(f"there is no text after {PATIENCE * self._limits.cpu_s:g} s")
            answers: list[Answer] = self._connection.recv()
            return answers
        except RecursionError:
            raise TemplateRefusal("it is nested more deeply than can be handed over") from None
        except (EOFError, ConnectionError):
            raise TemplateRefusal(self._reason()) from None

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._serve(ours, theirs, parent)
        theirs.close()
        self._finalizer = weakref.finalize(self, _end, pid, ours, parent)
        return ours

    def _serve(self, theirs: Connection, own: Connection, parent: int) -> NoReturn:
        """Be the child: take lists of items, answer with lists."""
        try:
            theirs.close()
            self._be_bounded(parent)
            gc.freeze()  # what the parent has is not looked through again, which would copy it
            while True:
                items = own.recv()
                signal.setitimer(signal.ITIMER_PROF, self._limits.cpu_s)
                answers = self._function(items)
                signal.setitimer(signal.ITIMER_PROF, 0)
                own.send(answers)
        except EOFError:
            os._exit(0)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def _be_bounded(self, parent: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the parent's business, which then ends this process
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)  # it died before the kernel was told
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * PAGESIZE + self._limits.memory_bytes
        given, _ = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if given == resource.RLIM_INFINITY else min(limit, given)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def _reason(self) -> str:
        """What has ended the child, which lets go of it."""
        assert self._finalizer is not None
        status, self._connection = self._finalizer(), None
        if status == -signal.SIGPROF:
            return f"it does not end within {self._limits.cpu_s:g} s of CPU time"
        if status == OUT_OF_MEMORY:
            return f"it takes more than {self._limits.memory_bytes / 1e9:.1f} GB of memory"
        if status is not None and status < 0:
            return f"its process was killed by {signal.Signals(-status).name}"
        return f"its process exited with code {status}"


def _end(pid: int, connection: Connection, parent: int) -> int | None:
    """Kill the child where it still lives; its exit code, negative for a signal."""
    if os.getpid() != parent:
        return None  # a copy of the object in another child
    connection.close()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status)


class Renderer:
    """The chat template of a tokenizer, in a process of its own. options: of `apply_chat_template`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], limits: RenderLimits | None = None
    ) -> None:
        self._tokenizer, self._options, self._limits = tokenizer, options, limits
        self._process: TemplateProcess[Any, str | TemplateRefusal] | None = None

    def texts(self, chats: Sequence[Any]) -> list[str]:
        """The text of each conversation. Raises TemplateRefusal for the first that is refused."""
        if self._process is None:
            variables = {**self._tokenizer.special_tokens_map, **self._options}
            given, tools = variables.pop("chat_template", None), variables.get("tools")
            template = refusable(lambda: self._tokenizer.get_chat_template(given, tools))
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
