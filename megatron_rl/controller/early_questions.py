"""Questions to a judge on ranks of its own, which are sent while responses are still generated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_rl.dispatch import Future
from megatron_rl.rollout.slices import Drawn, SliceReport, Start

Key = tuple[tuple[int, ...], int]
"""The tokens of a question and its seed, which decide its reply."""
SENT_AT_ONCE = 32
"""Questions that make a call, at most. It must not depend on a clock: an engine rounds by its batch."""
MOST_KEPT = 1 << 16
"""Replies that nobody has asked for yet, or ever will: those on responses that a batch lost."""


class EarlyQuestions:
    """Sends questions before their replies are wanted. send: calls the judge's ranks, which take one call at a time.
    num_seqs: questions that they work on at the same time.
    """

    def __init__(self, send: Callable[[Sequence[Start]], Future[list[SliceReport]]], num_seqs: int) -> None:
        self._send, self._at_once = send, min(num_seqs, SENT_AT_ONCE)
        self._waiting: dict[Key, Start] = {}
        self._calls: deque[tuple[Future[list[SliceReport]], list[Key]]] = deque()
        self._sent: set[Key] = set()
        self._replies: dict[Key, Drawn] = {}

    def begin(self, questions: Sequence[Start]) -> None:
        """Send questions, each once, as soon as enough of them wait."""
        self._waiting |= {key_of(start): start for start in questions if not self._has_begun(key_of(start))}
        if len(self._waiting) >= self._at_once:
            self._send_waiting()

    def start(self, questions: Sequence[Start]) -> Callable[[], dict[int, Drawn]]:
        """Send all that was not sent before; the result waits for the replies to these questions."""
        self.begin(questions)
        self._send_waiting()

        def wait() -> dict[int, Drawn]:
            while missing := [start for start in questions if key_of(start) not in self._replies]:
                if not self._calls:  # another one who asked the same has its reply
                    self.start(missing)
                self._take()
            found = {start.request: self._replies[key_of(start)] for start in questions}
            for start in questions:
                self._replies.pop(key_of(start), None)
            while len(self._replies) > MOST_KEPT:
                del self._replies[next(iter(self._replies))]
            return found

        return wait

    def _has_begun(self, key: Key) -> bool:
        return key in self._sent or key in self._replies

    def _send_waiting(self) -> None:
        if self._waiting:
            keys, starts = list(self._waiting), list(self._waiting.values())
            self._waiting.clear()
            self._sent.update(keys)
            numbered = [replace(start, request=number) for number, start in enumerate(starts)]
            self._calls.append((self._send(numbered), keys))

    def _take(self) -> None:
        """Wait for the oldest call."""
        future, keys = self._calls.popleft()
        for report in future.get():
            self._replies |= {keys[number]: drawn for number, drawn in report.drawn.items()}
        self._sent.difference_update(keys)


def key_of(start: Start) -> Key:
    """Return what decides the reply to a question of one judge."""
    return start.token_ids, start.seed
