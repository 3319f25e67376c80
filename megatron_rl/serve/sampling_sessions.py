"""Sampling sessions of all clients: each reads weights that a client has saved, or the model as the service starts.

They end with their weights. No processes, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.serve.bad_request import BadRequest, shown
from megatron_rl.serve.saved_states import SavedStates

MOST_SAMPLERS = 1000
"""A tenant's sessions but those of weights without a name, which are as many as these."""


@dataclass(frozen=True)
class SamplingSession:
    """A sampling session. weights: a path; "" for the model as the service starts."""

    tenant: str
    weights: str


class SamplingSessions:
    """Sampling sessions by their names."""

    def __init__(self, saved: SavedStates) -> None:
        """saved: the states whose weights they read."""
        self._saved = saved
        self._sessions: dict[str, SamplingSession] = {}

    def find(self, tenant: str, name: str) -> SamplingSession:
        """A session. Raises BadRequest for one that the tenant does not have."""
        session = self._sessions.get(name)
        if session is None or session.tenant != tenant or not self._has_weights(session):
            raise BadRequest("sampler_id", f"{shown(name)} is no sampling session of this key", 404)
        return session

    def make(self, tenant: str, name: str, weights: str) -> bool:
        """Begin a session, unless it exists; returns whether it is new.

        Raises BadRequest where it reads other weights, and where the tenant has too many.
        """
        self._end_without_weights()
        made = SamplingSession(tenant, weights)
        if self._sessions.get(name, made) != made:
            raise BadRequest("sampling_session_seq_id", f"{name} reads other weights; try: the next number")
        is_new, num_sessions = (
            name not in self._sessions,
            sum(self._is_counted(tenant, name) for name in self._sessions),
        )
        if is_new and num_sessions >= MOST_SAMPLERS:
            ways = "one of them, or to delete the checkpoint that some read"
            raise BadRequest("sampling_session", f"this key has {num_sessions} sampling sessions; try: {ways}", 429)
        self._sessions[name] = made
        return is_new

    def _is_counted(self, tenant: str, name: str) -> bool:
        session = self._sessions[name]
        state = self._saved.at(session.weights)
        return session.tenant == tenant and (state is None or state.is_named)

    def add_saved(self, tenant: str, name: str, weights: str) -> None:
        """Begin the session for which weights were saved, unless it exists."""
        self._sessions.setdefault(name, SamplingSession(tenant, weights))
        self._end_without_weights()

    def _end_without_weights(self) -> None:
        self._sessions = {name: one for name, one in self._sessions.items() if self._has_weights(one)}

    def _has_weights(self, session: SamplingSession) -> bool:
        return not session.weights or self._saved.at(session.weights) is not None

    def of(self, session: str) -> list[str]:
        """Names of the sampling sessions of a session."""
        return [name for name in self._sessions if name.startswith(f"{session}:")]

    def kept(self) -> dict[str, Any]:
        """Return the state that another object restores, as JSON."""
        return {name: asdict(one) for name, one in self._sessions.items()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue with what `kept` has returned."""
        self._sessions = {name: SamplingSession(**one) for name, one in kept.items()}
