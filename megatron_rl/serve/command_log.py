"""All commands that clients have given, in order and each once, with the next one to run and the replies.

A lane is a model: its commands run in the order of their numbers, in whatever order they arrive. Commands without a
number, such as samples of weights that stay, run as they come. Lanes of one tenant are served in the order in which
their commands became ready, and tenants one after the other. No processes, no clock, no torch.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.serve.bad_request import BadRequest

MOST_AHEAD = 4096
"""How far ahead of the next number of its lane a command may be: they wait in memory."""
MOST_REPLIES = 8192
"""Newest replies to a tenant that are kept in memory; the journal has all of them."""
MOST_WAITING = 16384
"""Commands of a tenant that have no reply."""
MOST_READ = 64
"""Newest replies to a tenant that outlive a pruned journal although they were read."""
ONCE = (":create", ":unload")
"""Ends of names of commands without a number that may run only once."""


@dataclass(frozen=True)
class CommandReply:
    """The result of a command: JSON, or bytes in Protocol Buffers; None where it is too old to be kept."""

    content: Any = None


def _as_text(reply: CommandReply | None) -> Any:
    content = None if reply is None else reply.content
    return [base64.b64encode(content).decode()] if isinstance(content, bytes) else content


def _of_text(text: Any) -> CommandReply:
    return CommandReply(base64.b64decode(text[0]) if isinstance(text, list) else text)


@dataclass(eq=False)
class Entry:
    """A command that was taken. lane: whose order it keeps; "" for none. number: in its lane, from 1. digest: that
    of the request's body.
    """

    request_id: str
    tenant: str
    lane: str
    number: int
    digest: str
    command: Any
    reply: CommandReply | None = None
    is_read: bool = False
    """Whether its client has asked for the reply since it exists."""


@dataclass
class _Lane:
    next_number: int = 1
    waiting: dict[int, Entry] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)

    def due(self) -> Iterator[Entry]:
        """Take what comes next, past numbers whose requests were refused, once a later one has come."""
        while self.waiting:
            if (entry := self.waiting.pop(self.next_number, None)) is not None:
                yield entry
            elif self.next_number not in self.refused:
                return
            self.refused.discard(self.next_number)
            self.next_number += 1


def _is_old(entry: Entry) -> bool:
    return entry.reply is None or entry.reply.content is None


class CommandLog:
    """The commands of one service. Not safe for threads."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._lanes: dict[str, _Lane] = {}
        self._ready: dict[str, deque[Entry]] = {}
        self._num_open: dict[str, int] = {}
        self._num_open_of_lane: dict[str, int] = {}
        self._replied: dict[str, deque[Entry]] = {}

    def submit(self, entry: Entry) -> tuple[Entry, bool]:
        """Take a command, or find it among those that were taken; returns it, and whether it is new.

        Raises BadRequest, with nothing changed, for another command of the same number, for a number that is too far
        ahead, and where the tenant has too many commands open.
        """
        known = self._entries.get(entry.request_id)
        if known is not None:
            if known.tenant != entry.tenant or known.digest != entry.digest:
                raise BadRequest(
                    "seq_id", f"{entry.number} was another command; try: {self.next_number(entry.lane)}, the next one"
                )
            return known, False
        if self._num_open.get(entry.tenant, 0) >= MOST_WAITING:
            raise BadRequest("request", f"{MOST_WAITING} commands of this key have no reply yet; try: later", 429)
        if entry.lane:
            self._check_number(entry)
        self._entries[entry.request_id] = entry
        self._num_open[entry.tenant] = self._num_open.get(entry.tenant, 0) + 1
        self._num_open_of_lane[entry.lane] = self.num_open(entry.lane) + 1
        if not entry.lane:
            self._ready.setdefault(entry.tenant, deque()).append(entry)
            return entry, True
        lane = self._lanes.setdefault(entry.lane, _Lane())
        lane.waiting[entry.number] = entry
        self._advance(entry.tenant, lane)
        return entry, True

    def _advance(self, tenant: str, lane: _Lane) -> None:
        for due in lane.due():
            self._ready.setdefault(tenant, deque()).append(due)

    def refuse(self, tenant: str, name: str, number: int) -> bool:
        """Note that a request of a lane was refused: later ones do not wait for its number; returns whether that is
        new. Another request may still have the number until a later one runs.
        """
        first = self.next_number(name)
        lane = self._lanes.setdefault(name, _Lane())
        if not first <= number < first + MOST_AHEAD or number in lane.refused or number in lane.waiting:
            return False
        lane.refused.add(number)
        self._advance(tenant, lane)
        return True

    def _check_number(self, entry: Entry) -> None:
        first = self.next_number(entry.lane)
        if not first <= entry.number < first + MOST_AHEAD:
            rule = f"{entry.number} is not in {first} to {first + MOST_AHEAD - 1}"
            raise BadRequest("seq_id", f"{rule}; try: {max(first, min(entry.number, first + MOST_AHEAD - 1))}")

    @property
    def is_idle(self) -> bool:
        """Whether every command has its reply."""
        return not any(self._num_open.values())

    def kept(self) -> dict[str, Any]:
        """Return the state that another log restores, as JSON, while nothing is open: the lanes' numbers, commands that
        are no model's and change something, replies that no client has read, and the newest of the others.
        """
        newest = {entry.request_id for replied in self._replied.values() for entry in list(replied)[-MOST_READ:]}
        entries = [
            [
                entry.request_id,
                entry.tenant,
                entry.lane,
                entry.number,
                entry.digest,
                _as_text(entry.reply),
                entry.is_read,
            ]
            for entry in self._entries.values()
            if entry.request_id in newest or entry.request_id.endswith(ONCE) or not (entry.is_read or _is_old(entry))
        ]
        lanes = {name: [lane.next_number, sorted(lane.refused)] for name, lane in self._lanes.items()}
        return {"lanes": lanes, "entries": entries}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue with what `kept` has returned. The log must be new."""
        self._lanes = {name: _Lane(number, refused=set(refused)) for name, (number, refused) in kept["lanes"].items()}
        for request_id, tenant, lane, number, digest, reply, is_read in kept["entries"]:
            entry = Entry(request_id, tenant, lane, number, digest, None, _of_text(reply), is_read)
            self._entries[request_id] = entry
            if not _is_old(entry):
                self._replied.setdefault(tenant, deque()).append(entry)

    def has(self, request_id: str) -> bool:
        """Whether a command was taken."""
        return request_id in self._entries

    def num_open(self, lane: str) -> int:
        """Commands of a lane that have no reply."""
        return self._num_open_of_lane.get(lane, 0)

    def next_number(self, lane: str) -> int:
        """The number of the first command of a lane that has not arrived."""
        return self._lanes[lane].next_number if lane in self._lanes else 1

    def next(self) -> Entry | None:
        """Take the next command to run: the tenant that has waited longest since its last one is next."""
        for tenant in list(self._ready):
            queue = self._ready.pop(tenant)
            if queue:
                entry = queue.popleft()
                if queue:
                    self._ready[tenant] = queue  # behind all others
                return entry
        return None

    def take_like(self, is_like: Any) -> Iterator[Entry]:
        """Take further commands that can run together with one: every command without a lane that `is_like`."""
        for tenant, queue in list(self._ready.items()):
            taken = [entry for entry in queue if not entry.lane and is_like(entry)]
            for entry in taken:
                queue.remove(entry)
                yield entry
            if not queue:
                del self._ready[tenant]

    def take(self, request_id: str) -> Entry:
        """Take a command that is ready by its name. Raises KeyError for another."""
        entry = self._entries[request_id]
        queue = self._ready.get(entry.tenant, deque())
        if entry not in queue:
            raise KeyError(f"command {request_id} is not ready")
        queue.remove(entry)
        if not queue:
            del self._ready[entry.tenant]
        return entry

    def finish(self, entry: Entry, reply: CommandReply) -> None:
        """Note the reply. Raises ValueError for a command that has one: it ran twice."""
        if entry.reply is not None:
            raise ValueError(f"command {entry.request_id} has run twice")
        entry.reply = reply
        entry.command = None
        self._num_open[entry.tenant] -= 1
        self._num_open_of_lane[entry.lane] -= 1
        kept = self._replied.setdefault(entry.tenant, deque())
        kept.append(entry)
        if len(kept) > MOST_REPLIES:
            kept.popleft().reply = CommandReply()

    def find(self, tenant: str, request_id: str) -> Entry:
        """A command of this tenant. Raises BadRequest for those of others."""
        entry = self._entries.get(request_id)
        if entry is None or entry.tenant != tenant:
            raise BadRequest("request_id", f"{request_id!r:.80} is no command of this key", 404)
        if entry.reply is not None and entry.reply.content is None:
            raise BadRequest(
                "request_id", f"{request_id!r:.80} is older than the {MOST_REPLIES} replies that are kept", 410
            )
        entry.is_read = entry.reply is not None
        return entry
