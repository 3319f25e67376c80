"""schedule.jsonl: what happened to the schedule, one line per fact, for reading and for replay.

A slice is written once its replica has answered. A slice that a dying replica never answered is not in the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from megatron_rl.agents.as_json import answer_from_json, turn_from_json
from megatron_rl.agents.episode import Reply
from megatron_rl.images import numbers_of_pieces, pieces_of_numbers
from megatron_rl.observe.appended_file import AppendedFile, replace_file
from megatron_rl.sampling.request_scheduler import RequestScheduler
from megatron_rl.sampling.schedule_types import (
    Counts,
    GroupsJoined,
    GroupSwap,
    Judged,
    Numbers,
    RequestDecision,
    SliceOrder,
    Verdict,
)
from megatron_rl.sampling.verdicts import GroupVerdicts

SCHEDULE_FILE = "schedule.jsonl"


@dataclass(frozen=True)
class Began:
    """The first line: the rules, and the seed of all samples."""

    event: ClassVar[str] = "began"
    settings: dict[str, Any]


@dataclass(frozen=True)
class SliceDone:
    """A replica answered a slice. num_steps: engine steps taken. finished: requests that ended in it; away: requests of
    which a turn ended in it.
    """

    event: ClassVar[str] = "slice"
    replica: int
    version: int
    num_steps: int
    starts: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    away: tuple[int, ...] = ()


@dataclass(frozen=True)
class TurnAnswered:
    """A turn of a request got its reply, and token_ids are read next, again if a conversation begins with them.
    Requests of a validation are below 0. images: `numbers_of_pieces` of those of token_ids.
    """

    event: ClassVar[str] = "turn"
    request: int
    turn: dict[str, Any]
    answer: dict[str, Any]
    token_ids: tuple[int, ...] = ()
    anew: bool = False
    images: tuple[int, ...] = ()

    @property
    def reply(self) -> Reply:
        """The response. Raises ValueError for a line that no run writes."""
        images = pieces_of_numbers(self.images)
        return Reply(turn_from_json(self.turn), answer_from_json(self.answer), self.token_ids, self.anew, images)


@dataclass(frozen=True)
class EpisodeBegan:
    """The environment of a request has begun its episode with token_ids, or failed to. images: as `TurnAnswered`."""

    event: ClassVar[str] = "opened"
    request: int
    answer: dict[str, Any]
    token_ids: tuple[int, ...] = ()
    images: tuple[int, ...] = ()

    @property
    def reply(self) -> Reply:
        """How it began. Raises ValueError for a line that no run writes."""
        return Reply(None, answer_from_json(self.answer), self.token_ids, images=pieces_of_numbers(self.images))


def reply_event(request: int, reply: Reply) -> TurnAnswered | EpisodeBegan:
    """The event of a reply to a turn, or of the beginning of an episode."""
    answer, images = asdict(reply.answer), numbers_of_pieces(reply.images)
    if reply.turn is None:
        return EpisodeBegan(request, answer, reply.token_ids, images)
    return TurnAnswered(request, asdict(reply.turn), answer, reply.token_ids, reply.is_anew, images)


@dataclass(frozen=True)
class ReplicaLost:
    """A replica died."""

    event: ClassVar[str] = "lost"
    replica: int


@dataclass(frozen=True)
class ReplicaBack:
    """A replica has restarted with `version`."""

    event: ClassVar[str] = "back"
    replica: int
    version: int


@dataclass(frozen=True)
class VersionReady:
    """All living replicas received `version`."""

    event: ClassVar[str] = "ready"
    version: int


@dataclass(frozen=True)
class StepTaken:
    """The trainer took batch `step`. dropped: groups of the batch that are not trained."""

    event: ClassVar[str] = "taken"
    step: int
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Counted:
    """`RequestScheduler.counts` as the metrics of the last taken step had them. The sampler appends this."""

    event: ClassVar[str] = "counted"
    counts: dict[str, int]


@dataclass(frozen=True)
class Saved:
    """A checkpoint after `step` was written."""

    event: ClassVar[str] = "saved"
    step: int


@dataclass(frozen=True)
class Interrupted:
    """After `step` all engines did something else, such as a validation, and lost their requests."""

    event: ClassVar[str] = "interrupted"
    step: int


@dataclass(frozen=True)
class Resumed:
    """A new process continued after `step`; all engines were empty and had that version. The controller appends
    this.
    """

    event: ClassVar[str] = "resumed"
    step: int


@dataclass(frozen=True)
class Traded:
    """A `GroupSwap` of a journal in which a request's number was its place in a batch: late groups and finished ones
    took each other's numbers. `read_events` translates it.
    """

    event: ClassVar[str] = "traded"
    late: tuple[int, ...]
    ready: tuple[int, ...]


Event = (
    Began
    | SliceDone
    | TurnAnswered
    | EpisodeBegan
    | ReplicaLost
    | ReplicaBack
    | VersionReady
    | StepTaken
    | Counted
    | Saved
    | Interrupted
    | Resumed
    | RequestDecision
    | GroupSwap
    | Traded
    | GroupsJoined
    | Judged
)
KINDS: dict[str, type[Event]] = {kind.event: kind for kind in get_args(Event)}
NUMBERS = tuple[int, ...]
TYPES = {kind: get_type_hints(kind) for kind in KINDS.values()}
"""Kind -> field -> its type."""


def to_json(event: Event) -> str:
    """The line of an event, without its end; empty tuples are left out."""
    values = {name: value for name, value in asdict(event).items() if value != ()}
    return json.dumps({"event": event.event, **values}, separators=(",", ":"))


def from_json(line: str) -> Event:
    """The event of a line. Raises ValueError if the line is not an event."""
    try:
        values: dict[str, Any] = json.loads(line)
        kind = KINDS[values.pop("event")]
        types = TYPES[kind]
        arguments: dict[str, Any] = {
            name: tuple(value) if types[name] == NUMBERS else value for name, value in values.items()
        }
        if all(_is_of(types[name], value) for name, value in arguments.items()):
            return kind(**arguments)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a line of {SCHEDULE_FILE}: {line!r:.200}") from error
    raise ValueError(f"not a line of {SCHEDULE_FILE}: {line!r:.200}")


def _is_of(wanted: Any, value: object) -> bool:
    """Whether a value has a field's type: a number, numbers, an object, or one of the words of a Literal."""
    if wanted == NUMBERS:
        return all(type(number) is int for number in value) if isinstance(value, tuple) else False
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    return type(value) is (get_origin(wanted) or wanted)


def read_events(file: Path) -> list[Event]:
    """All events of a file. A last line without its end is left out: a kill has cut it off. Raises ValueError."""
    return with_lasting_numbers([from_json(line) for line in _whole_lines(file)])


def with_lasting_numbers(events: Sequence[Event]) -> list[Event]:
    """The events with each request's first number throughout, where `Traded` lines gave it others."""
    first: dict[int, int] = {}
    found: list[Event] = []
    for event in events:
        if isinstance(event, Traded):
            late, ready = (tuple(first.get(number, number) for number in part) for part in (event.late, event.ready))
            first |= dict(zip((*event.late, *event.ready), (*ready, *late), strict=True))
            event = GroupSwap(late, ready)
        elif first and isinstance(event, SliceDone):
            lists = (event.starts, event.drops, event.finished, event.away)
            starts, drops, *ended = (tuple(first.get(number, number) for number in part) for part in lists)
            finished, away = map(tuple, map(sorted, ended))
            event = replace(event, starts=starts, drops=drops, finished=finished, away=away)
        elif first and isinstance(event, TurnAnswered | EpisodeBegan | RequestDecision):
            event = replace(event, request=first.get(event.request, event.request))
        found.append(event)
    return found


def _whole_lines(file: Path) -> list[str]:
    *lines, _torn = file.read_text(errors="replace").split("\n")
    return lines


class Journal:
    """Appends events to a file. A line is handed to the operating system before `append` returns."""

    def __init__(self, file: Path, num_kept: int = 0) -> None:
        """Keep the first `num_kept` lines of `file`, those that a checkpoint counts, and drop the rest. Raises
        OSError.
        """
        kept = _whole_lines(file)[:num_kept] if file.exists() else []
        replace_file(file, "".join(line + "\n" for line in kept).encode())
        self.num_lines = len(kept)
        self._file = AppendedFile(file)

    def append(self, event: Event) -> None:
        """Write one line. Raises OSError."""
        self._file.append(to_json(event).encode() + b"\n")
        self.num_lines += 1

    def close(self) -> None:
        """Release the file."""
        self._file.close()


class Questions:
    """The questions of a `RequestScheduler`, passed on to another one."""

    def __init__(self, scheduler: RequestScheduler) -> None:
        self._decider = scheduler
        self.counts, self.groups = scheduler.counts, scheduler.groups
        self.verdicts: GroupVerdicts = scheduler.verdicts

    @property
    def admits(self) -> bool:
        return self._decider.admits

    @admits.setter
    def admits(self, admits: bool) -> None:
        self._decider.admits = admits

    def is_complete(self, step: int) -> bool:
        return self._decider.is_complete(step)

    def wanted_version(self, replica: int) -> int | None:
        return self._decider.wanted_version(replica)

    def may_send(self, version: int) -> bool:
        return self._decider.may_send(version)

    def may_save(self, step: int) -> bool:
        return self._decider.may_save(step)

    def state_dict(self) -> dict[str, Any]:
        return self._decider.state_dict()


class RecordedVerdicts:
    """Passes verdicts on, and writes them and what follows from them to a journal."""

    def __init__(self, verdicts: GroupVerdicts, journal: Journal) -> None:
        self._verdicts, self._journal = verdicts, journal
        self._joined: list[GroupsJoined] = []

    @property
    def unjudged(self) -> Collection[int]:
        return self._verdicts.unjudged

    def open_groups(self) -> None:
        self._verdicts.open_groups()
        self.write_joined()

    def take_joined(self) -> Sequence[GroupsJoined]:
        self.write_joined()
        joined, self._joined = self._joined, []
        return joined

    def judged(self, group: int, verdict: Verdict) -> None:
        self._verdicts.judged(group, verdict)
        self._journal.append(Judged(group, verdict))
        self.write_joined()

    def write_joined(self) -> None:
        """Write what has happened to groups; before a batch is taken, so that it is known what was in it."""
        for event in self._verdicts.take_joined():
            self._journal.append(event)
            self._joined.append(event)


class Recorder(Questions):
    """A scheduler that passes everything on to another one and writes what happens to a journal."""

    def __init__(self, scheduler: RequestScheduler, journal: Journal) -> None:
        """The caller closes the journal."""
        super().__init__(scheduler)
        self.verdicts = self._verdicts = RecordedVerdicts(scheduler.verdicts, journal)
        self._journal = journal
        self._orders: dict[int, SliceOrder] = {}

    def next_order(self, replica: int) -> SliceOrder | None:
        order = self._decider.next_order(replica)
        if order is not None:
            self._orders[replica] = order
        return order

    def slice_done(self, replica: int, num_steps: int, tokens: Counts, finished: Numbers, away: Numbers = ()) -> None:
        self._decider.slice_done(replica, num_steps, tokens, finished, away)
        order = self._orders.pop(replica)
        ended, left = tuple(sorted(finished)), tuple(sorted(away))
        self._journal.append(SliceDone(replica, order.version, num_steps, order.starts, order.drops, ended, left))

    def returned(self, request: int, is_finished: bool) -> None:
        self._decider.returned(request, is_finished)

    def sending(self, version: int) -> None:
        self._decider.sending(version)

    def version_ready(self, version: int) -> None:
        self._decider.version_ready(version)
        self._journal.append(VersionReady(version))

    def step_taken(self, step: int) -> GroupSwap | None:
        self._verdicts.write_joined()
        swap = self._decider.step_taken(step)
        if swap is not None:
            self._journal.append(swap)
        self._journal.append(StepTaken(step, tuple(self.groups.dropped(step))))
        return swap

    def saved(self, step: int, interrupted: bool = False) -> None:
        self._decider.saved(step, interrupted)
        self._journal.append(Interrupted(step) if interrupted else Saved(step))

    def replica_lost(self, replica: int) -> None:
        self._decider.replica_lost(replica)
        self._orders.pop(replica, None)
        self._journal.append(ReplicaLost(replica))

    def replica_back(self, replica: int, version: int) -> None:
        self._decider.replica_back(replica, version)
        self._journal.append(ReplicaBack(replica, version))

    def take_decisions(self) -> Sequence[RequestDecision]:
        decisions = self._decider.take_decisions()
        for decision in decisions:
            self._journal.append(decision)
        return decisions
