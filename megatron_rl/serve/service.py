"""A service: the requests of its clients, their journal, and the loop that runs them on the roles.

The clients' thread calls `post` and `reply_to`, the main thread `serve` or `repeat`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.errors import ConfigError
from megatron_rl.plain_values import strict_json
from megatron_rl.serve.bad_request import BadRequest
from megatron_rl.serve.client_commands import Command, SampleTokens
from megatron_rl.serve.command_log import CommandReply, Entry
from megatron_rl.serve.desk import Body, Desk
from megatron_rl.serve.request_journal import EXPIRY, REFUSAL, REPLY, REQUEST, SNAPSHOT, RequestJournal, records
from megatron_rl.serve.request_values import text


class Runs(Protocol):
    """What runs commands: `role_driver.RoleDriver`."""

    @property
    def num_slots(self) -> int: ...

    def run(self, command: Command) -> Any: ...

    def sample(self, commands: list[SampleTokens]) -> list[bytes]: ...

    def keep(self, models: Sequence[str], copies: Sequence[str]) -> dict[str, Any]: ...

    def settle(self, kept: Mapping[str, Any]) -> None: ...

    def restore(self, kept: Mapping[str, Any]) -> None: ...


@dataclass
class Repeated:
    """What a journal's repetition has found. others: commands whose replies are not those of the journal."""

    num_requests: int = 0
    num_equal: int = 0
    others: tuple[str, ...] = ()


class TrainingService:
    """It writes no journal while one is repeated. most_bytes: largest journal that no snapshot replaces; 0: any."""

    def __init__(self, desk: Desk, worker: Runs, most_bytes: float = 0) -> None:
        self._desk, self._worker, self._most_bytes = desk, worker, most_bytes
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._journal: RequestJournal | None = None
        self._num_groups = 0
        self.heard: Callable[[], None] = lambda: None
        """Called, in the main thread, when a command has its reply."""

    # The clients' thread

    @property
    def names(self) -> list[str]:
        """Names of the requests that are taken."""
        return list(self._desk.posts)

    @staticmethod
    def request_named(content: bytes) -> str:
        """The command whose reply a body asks for. Raises BadRequest."""
        return text(read_body(content, is_json=True).values, "request_id")

    def post(self, tenant: str, name: str, content: bytes, is_json: bool) -> dict[str, Any]:
        """Take a request; returns its reply once it is in the journal. Raises BadRequest."""
        body = read_body(content, is_json)
        with self._lock:
            before = self._desk.num_changes
            self._desk.now = time.time()
            try:
                reply = self._desk.posts[name](tenant, body)
            finally:
                self._note_refusal(tenant)
            if self._desk.num_changes > before and self._journal is not None:
                head = {"kind": REQUEST, "tenant": tenant, "name": name, "json": is_json, "at": self._desk.now}
                self._journal.add(head, content)
                self._work.notify()
        return reply

    def _note_refusal(self, tenant: str) -> None:
        if self._desk.refused is not None and self._journal is not None:
            model, number = self._desk.refused
            self._journal.add({"kind": REFUSAL, "tenant": tenant, "model": model, "number": number})
            self._work.notify()
        self._desk.refused = None

    def reply_to(self, tenant: str, request_id: str) -> CommandReply | None:
        """The reply to a command; None: it has none yet. Raises BadRequest for a command of another tenant."""
        with self._lock:
            return self._desk.log.find(tenant, request_id).reply

    @contextmanager
    def reading(self) -> Iterator[Desk]:
        """The desk as it is now, for what changes nothing."""
        with self._lock:
            self._desk.now = time.time()
            yield self._desk

    # The main thread

    def serve(self, path: Path, is_over: Callable[[], bool], wait_s: float = 0.5) -> None:
        """Run what clients ask, and write the journal, until the service is to end."""
        self._journal = RequestJournal(path)
        try:
            while not is_over():
                with self._work:
                    self._expire()
                    entries = self._next()
                    if not entries:
                        self._work.wait(wait_s)
                        continue
                self._run(entries)
                self._prune()
        finally:
            self._journal.close()

    def _prune(self) -> None:
        """Begin a journal again with a snapshot, where it has become too large and nothing is open."""
        assert self._journal is not None
        if not 0 < self._most_bytes < self._journal.num_bytes:
            return
        with self._lock:
            if self._desk.log.is_idle:
                of_worker = self._worker.keep(self._desk.loaded_models, self._desk.copies)
                kept = {"desk": self._desk.kept(), "worker": of_worker, "num_groups": self._num_groups}
                self._journal.restart({"kind": SNAPSHOT, "at": self._desk.now}, json.dumps(kept).encode())
                self._worker.settle(of_worker)
                self._desk.renew_log()

    def _restore(self, kept: Mapping[str, Any]) -> None:
        self._desk.restore(kept["desk"])
        self._worker.restore(kept["worker"])
        self._num_groups = kept["num_groups"]

    def _expire(self) -> None:
        """Remove saved states whose time is over, and write that into the journal."""
        self._desk.now = time.time()
        if self._desk.has_due and self._journal is not None:
            self._journal.add({"kind": EXPIRY, "at": self._desk.now})
            self._desk.expire()

    def _next(self) -> list[Entry]:
        entry = self._desk.log.next()
        if entry is None:
            return []
        if not isinstance(entry.command, SampleTokens):
            return [entry]
        copies = {entry.command.weights}

        def is_like(other: Entry) -> bool:
            """Whether generation has a slot for its copy, too."""
            if not isinstance(other.command, SampleTokens):
                return False
            fits = other.command.weights in copies or len(copies) < self._worker.num_slots
            copies.update([other.command.weights] if fits else [])
            return fits

        return [entry, *self._desk.log.take_like(is_like)]

    def _run(self, entries: list[Entry]) -> None:
        contents = self._contents(entries)
        self._num_groups += 1
        with self._lock:
            for entry, content in zip(entries, contents, strict=True):
                is_json = not isinstance(content, bytes)
                written = json.dumps(content).encode() if is_json else content
                head = {"kind": REPLY, "request": entry.request_id, "json": is_json, "group": self._num_groups}
                if self._journal is not None:
                    self._journal.add(head, written)
                self._desk.finish(entry, CommandReply(content))
        self.heard()

    def _contents(self, entries: list[Entry]) -> list[Any]:
        if isinstance(entries[0].command, SampleTokens):
            return list(self._worker.sample([entry.command for entry in entries]))
        return [self._worker.run(entry.command) for entry in entries]

    def repeat(self, path: Path, samples_again: bool) -> Repeated:
        """Come back to where a journal ends: commands run again, in the order in which they ran.

        samples_again: samples are drawn again, too; else the journal's are taken, since nothing depends on them.
        """
        found, others, groups = Repeated(), list[str](), dict[int, list[tuple[Entry, Any]]]()
        for head, content in records(path):
            self._desk.now = head.get("at", self._desk.now)
            if head["kind"] == SNAPSHOT:
                self._restore(json.loads(content))
                continue
            if head["kind"] == REFUSAL:
                self._repeat_all(groups, samples_again, found, others)
                self._desk.log.refuse(head["tenant"], head["model"], head["number"])
                continue
            if head["kind"] == EXPIRY:
                self._repeat_all(groups, samples_again, found, others)
                self._desk.expire()
                continue
            if head["kind"] == REQUEST:
                self._repeat_all(groups, samples_again, found, others)
                found.num_requests += 1
                try:
                    self._desk.posts[head["name"]](head["tenant"], read_body(content, head["json"]))
                except BadRequest as refusal:
                    raise ConfigError(f"{path} does not fit this configuration: {refusal}") from None
                continue
            if head["group"] not in groups:
                self._repeat_all(groups, samples_again, found, others)
            entry = self._desk.log.take(head["request"])
            groups.setdefault(head["group"], []).append((entry, json.loads(content) if head["json"] else content))
            self._num_groups = head["group"]
        self._repeat_all(groups, samples_again, found, others)
        found.others = tuple(others)
        return found

    def _repeat_all(
        self, groups: dict[int, list[tuple[Entry, Any]]], samples_again: bool, found: Repeated, others: list[str]
    ) -> None:
        """Run what was taken together, and compare the replies."""
        for group in groups.values():
            entries, recorded = [entry for entry, _ in group], [content for _, content in group]
            is_taken = isinstance(entries[0].command, SampleTokens) and not samples_again
            contents = recorded if is_taken else self._contents(entries)
            for entry, content, before in zip(entries, contents, recorded, strict=True):
                found.num_equal += content == before
                if content != before:
                    others.append(entry.request_id)
                self._desk.finish(entry, CommandReply(content))
        groups.clear()


def read_body(content: bytes, is_json: bool) -> Body:
    """The body of a request. Raises BadRequest for what is no JSON object."""
    if not is_json:
        return Body(content, None)
    try:
        values = strict_json(content or b"{}")
    except ValueError as error:
        raise BadRequest("body", f"it is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadRequest("body", "it is no JSON object")
    return Body(content, values)
