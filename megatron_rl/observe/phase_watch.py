"""Say who is at work, how far, and what is left, where a phase of a run takes longer than a minute.

The driver waits meanwhile, so a thread of its own looks. Its sentences are facts that the driver has: the phase and its
seconds, what ranks report with their signs of life, responses and episodes that are complete, the same phase's seconds
the last time, and what is planned. Unknown facts are left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from megatron_rl.observe.picture_style import phase_name
from megatron_rl.observe.step_line import brief
from megatron_rl.observe.terminal import Announcer, Terminal

FIRST_S, EVERY_S = 60.0, 60.0
"""Seconds of a phase before the first line, and between two lines."""
LOOK_S = 1.0
SHORT_S = 1.0
"""Phases that were shorter say nothing about the next time."""

Facts = Callable[[str], Iterable[str]]
"""Innermost phase -> what is known about its progress; called from another thread."""


@contextmanager
def watching(phase: str) -> Iterator[None]:
    """Watch one phase, where no logger is open."""
    with PhaseWatch(Announcer(Terminal()).say) as watch:
        watch.phases([phase])
        yield


class PhaseWatch:
    """Watches the phases of a run; inside its block a thread passes sentences to `say`. None: none are said.

    step: of the run, 0 before the first. planned: phase -> planned seconds. note: about the present phase. clock: in
    seconds, from any beginning.
    """

    def __init__(
        self, say: Callable[[str], None] | None, num_steps: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._num_steps, self._clock = say, num_steps, clock
        self.step = 0
        self.planned: Mapping[str, float] = {}
        self.note = ""
        self._facts: list[Facts] = []
        self._open: tuple[str, ...] = ()
        self._outer, self._began, self._due = "", 0.0, 0.0
        self._ended = 0.0
        self._last: dict[str, float] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phase watch", daemon=True)

    def __enter__(self) -> Self:
        if self._say is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()

    def ask(self, facts: Facts) -> None:
        """Ask for these facts, too."""
        self._facts.append(facts)

    def phases(self, names: Sequence[str]) -> None:
        """The open phases have changed, the outermost first. One that opens again at once, as where several calls are
        waited for, goes on.
        """
        now = self._clock()
        is_next_of_its_kind = not self._open and now - self._ended >= SHORT_S
        if not names:
            self._ended = now
        elif names[0] != self._outer or is_next_of_its_kind:
            if self._outer and self._ended - self._began >= SHORT_S:
                self._last[self._outer] = self._ended - self._began
            self._outer, self._began, self._due = names[0], now, now + FIRST_S
        self._open = tuple(names)

    def look(self) -> str | None:
        """Return the sentence that is due now; None: there is none."""
        now = self._clock()
        if not self._open or now < self._due:
            return None
        self._due = now + EVERY_S
        phases = list(dict.fromkeys((self._outer, self._open[-1])))
        place = f"step {self.step}/{self._num_steps}, " if self.step else ""
        head = f"{place}{', '.join(map(phase_name, phases))}: {brief(now - self._began)} so far"
        return "; ".join((head, *self.progress(), *self._expected()))

    def progress(self) -> list[str]:
        """Return what is known about the progress of the present phase."""
        inner = self._open[-1] if self._open else ""
        known = [fact for facts in self._facts for fact in facts(inner)] if inner else []
        return [*([self.note] if self.note else []), *known]

    def _expected(self) -> list[str]:
        known = []
        if (last := self._last.get(self._outer)) is not None:
            known.append(f"{brief(last)} the last time")
        if (planned := self.planned.get(self._outer)) is not None:
            known.append(f"{brief(planned)} planned")
        return known

    def _run(self) -> None:
        while self._say is not None and not self._ends.wait(LOOK_S):
            sentence = self.look()
            if sentence is not None:
                self._say(sentence)
