"""States and weights that clients have saved, by path: whose they are, when they end, and which commands read them.

A path names a copy. When the path is deleted, has expired or is saved again, its copy is dropped as soon as no open
command reads or writes it. No processes, no clock, no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from megatron_rl.serve import request_values
from megatron_rl.serve.bad_request import BadRequest, shown
from megatron_rl.serve.client_commands import Command, CreateModel, LoadWeights, SampleTokens, SaveWeights

SCHEME = "tinker://"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
MOST_SAVED, MOST_UNNAMED = 1000, 64
"""Paths of a tenant; and of a model's weights that were saved for one sampling session, without a name: the newest."""
SHORTEST_TTL, LONGEST_TTL = 3600, 10 * 365 * 86400
"""Seconds."""
MOST_METADATA = 4096
"""Characters."""


@dataclass(frozen=True)
class ClientState:
    """A state, or weights for sampling. copy: its name where the ranks keep it. at: seconds since 1970, as is
    expires_at; None: it never does. num_bytes: on all ranks; 0 until it is whole.
    """

    tenant: str
    model: str
    path: str
    for_sampling: bool
    copy: str
    at: float
    expires_at: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    is_named: bool = True
    is_whole: bool = False
    num_bytes: int = 0

    @property
    def checkpoint(self) -> dict[str, Any]:
        """As lists of checkpoints have it."""
        return {
            "checkpoint_id": "/".join(self.path.removeprefix(SCHEME).split("/")[1:]),
            "checkpoint_type": "sampler" if self.for_sampling else "training",
            "time": as_time(self.at),
            "tinker_path": self.path,
            "size_bytes": self.num_bytes,
            "public": False,
            "user_metadata": dict(self.metadata) or None,
            "expires_at": None if self.expires_at is None else as_time(self.expires_at),
        }


def as_time(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def copy_of(command: Command) -> str:
    """The copy that a command reads or writes; "" for none."""
    match command:
        case SampleTokens():
            return command.weights
        case CreateModel() | LoadWeights() | SaveWeights():
            return command.path
    return ""


def new_name(values: Mapping[str, Any]) -> str:
    """The name under which a request saves. Raises BadRequest."""
    name = request_values.text(values, "path")
    if NAME.fullmatch(name) is None:
        near = re.sub("[^A-Za-z0-9_-]+", "-", name)[:64].strip("-") or "a"
        rule = "is no name of at most 128 letters, digits, '.', '_' and '-' that begins with no '.'"
        raise BadRequest("path", f"{shown(name)} {rule}; try: {near}")
    return name


def read_expiry(values: Mapping[str, Any], now: float) -> float | None:
    """The time at which a new state expires; None: never. Raises BadRequest."""
    if values.get("ttl_seconds") is None:
        return None
    return now + request_values.whole(values, "ttl_seconds", SHORTEST_TTL, LONGEST_TTL)


def read_metadata(values: Mapping[str, Any]) -> Mapping[str, str]:
    """A client's own texts. Raises BadRequest."""
    metadata = values.get("user_metadata") or {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise BadRequest("user_metadata", f"{shown(metadata)} has values that are no texts")
    if (size := sum(len(name) + len(text) for name, text in metadata.items())) > MOST_METADATA:
        raise BadRequest("user_metadata", f"it has {size} characters; try: at most {MOST_METADATA}")
    return metadata


class SavedStates:
    """All saved paths. drop: called with (tenant, copy) when a copy is to go."""

    def __init__(self, drop: Callable[[str, str], None]) -> None:
        self._drop = drop
        self._states: dict[str, ClientState] = {}
        self._times_saved: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._unnamed: dict[str, list[str]] = {}
        self._going: dict[str, str] = {}  # copy without a path, which an open command uses -> tenant

    def find(self, tenant: str, path: Any, now: float) -> ClientState:
        """A state that is whole and has not expired. Raises BadRequest, with 404, for others and other tenants'."""
        saved = self._states.get(path) if isinstance(path, str) else None
        if saved is None or saved.tenant != tenant or not saved.is_whole or _is_over(saved, now):
            raise BadRequest("path", f"{shown(path)} is nothing that this key has saved", 404)
        return saved

    def at(self, path: str) -> ClientState | None:
        """The state of a path, whole or not, expired or not."""
        return self._states.get(path)

    def of_tenant(self, tenant: str, now: float, model: str | None = None) -> list[ClientState]:
        """Return the states that a tenant can load, the newest last. model: of this one alone."""
        states = [one for one in self._states.values() if one.tenant == tenant and model in (None, one.model)]
        return [one for one in states if one.is_whole and not _is_over(one, now)]

    def next_copy(self, tenant: str, path: str, overwrite: bool) -> str:
        """The name of the copy that a request would save. Raises BadRequest where the path is taken or too many are."""
        if path in self._states and not overwrite:
            name = path.rpartition("/")[2]
            raise BadRequest("path", f"{name} is saved already; try: overwrite=true, or {name[:120]}-2")
        if path not in self._states and sum(one.tenant == tenant for one in self._states.values()) >= MOST_SAVED:
            raise BadRequest("path", f"this key has {MOST_SAVED} saved states; try: overwrite=true, or delete one", 429)
        return f"{path}~{self._times_saved[path]}" if self._times_saved[path] else path

    def add(self, state: ClientState) -> None:
        """Note a path that a command is to save, in place of an older copy."""
        self.remove(state.path)
        self._times_saved[state.path] += 1
        self._states[state.path] = state
        if not state.is_named:
            unnamed = self._unnamed.setdefault(state.model, [])
            unnamed.append(state.path)
            if len(unnamed) > MOST_UNNAMED:
                self.remove(unnamed[0])

    def saved(self, path: str, copy: str, num_bytes: int) -> None:
        """Note that a copy is whole."""
        if path in self._states and self._states[path].copy == copy:
            self._states[path] = replace(self._states[path], is_whole=True, num_bytes=num_bytes)

    def set_expiry(self, state: ClientState, expires_at: float | None) -> None:
        """Have a state expire at another time."""
        self._states[state.path] = replace(state, expires_at=expires_at)

    def remove(self, path: str) -> None:
        """Forget a path, if it exists."""
        state = self._states.pop(path, None)
        if state is None:
            return
        if not state.is_named:
            self._unnamed[state.model].remove(path)
        if self._open[state.copy]:
            self._going[state.copy] = state.tenant
        else:
            self._drop(state.tenant, state.copy)

    def remove_unnamed(self, model: str) -> None:
        """Forget the states that a model has saved without a name."""
        for path in list(self._unnamed.pop(model, [])):
            self._unnamed[model] = [path]
            self.remove(path)
        self._unnamed.pop(model, None)

    @property
    def copies(self) -> list[str]:
        """Names of all copies, of paths that exist."""
        return [state.copy for state in self._states.values()]

    def kept(self) -> dict[str, Any]:
        """Return the state that another object restores, as JSON, while no command is open."""
        return {"states": [asdict(one) for one in self._states.values()], "times_saved": self._times_saved}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue with what `kept` has returned. This must be new."""
        self._states = {one["path"]: ClientState(**one) for one in kept["states"]}
        self._times_saved = Counter(kept["times_saved"])
        for state in self._states.values():
            if not state.is_named:
                self._unnamed.setdefault(state.model, []).append(state.path)

    def due(self, now: float) -> list[str]:
        """Paths that have expired."""
        return [path for path, state in self._states.items() if _is_over(state, now) and state.is_whole]

    def begin(self, command: Command) -> None:
        """Note an open command."""
        if copy := copy_of(command):
            self._open[copy] += 1

    def end(self, command: Command) -> None:
        """Note that a command has run; the copy that nothing names any more goes with its last one."""
        if not (copy := copy_of(command)):
            return
        self._open[copy] -= 1
        if not self._open[copy]:
            del self._open[copy]
            if copy in self._going:
                self._drop(self._going.pop(copy), copy)


def _is_over(state: ClientState, now: float) -> bool:
    return state.expires_at is not None and state.expires_at <= now
