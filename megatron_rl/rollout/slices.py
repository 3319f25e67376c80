"""What the controller and a rollout replica say to each other about generation in slices: a counted number of engine
steps, between which requests come and go and weights change.

The controller owns every request: what it has drawn so far, and under which weights. A replica only knows which
requests are unfinished in its engine. So to recompute keys and values, to move a request or to go on after a restart is
one and the same thing: drop a request, and start it anew with the tokens it has as the end of its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.records import Sampling

FINISHED_BY_STOP, FINISHED_BY_LENGTH = "stop", "length"
"""Why an answer ended: with an end token, or at its last allowed token. Empty while it has not."""


@dataclass(frozen=True)
class Start:
    """A request that a replica begins: all tokens it is given, the seed of those it draws, and how many it may draw.

    request: its number, unique in the run. token_ids: the prompt, and what was drawn of the answer before.
    """

    request: int
    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Slice:
    """What one replica does next: hold these weights, drop and start requests in this order, then step its engine.

    version: of the weights, in training steps; they have come to the replica before. num_steps: engine steps, at most;
    a slice ends earlier once nothing is left to generate. None: until nothing is.
    """

    version: int
    num_steps: int | None
    starts: tuple[Start, ...] = ()
    drops: tuple[int, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """What one slice added to a request: tokens, the engine's log-prob of each, and why the answer ended, if it did."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: str = ""


@dataclass(frozen=True)
class SliceReport:
    """What one replica did: engine steps taken, and for each request that got further its new tokens.

    version: of the weights it holds; -1 before any have come. start, stop: seconds since the epoch. swap_seconds: of
    them, what taking the slice's weights took, the wait for them included.
    broken: why the slice's weights did not come, when the transfer that should have brought them broke. The slice was
    not begun then: nothing was dropped, started or drawn, and the replica holds the version it had.
    """

    replica: int
    version: int
    num_steps: int
    drawn: dict[int, Drawn] = field(default_factory=dict)
    start: float = 0.0
    stop: float = 0.0
    swap_seconds: float = 0.0
    broken: str = ""
