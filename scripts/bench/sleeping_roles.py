"""Roles that sleep where real ones compute, so that a run of theirs costs what its schedule and the controller cost.

An answer's length is the first token of its prompt, so that replicas need no more than what `slices` tells real ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.roles import ACTOR, ROLLOUT
from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.hybrid_engine.weight_transfer import SendAttempt
from megatron_rl.roles.environment import RankEnvironment
from megatron_rl.roles.transfer_address import TransferAddress, TransferSettings
from megatron_rl.rollout.slices import FINISHED_BY_STOP, Drawn, Slice, SliceReport
from megatron_rl.sampling.engine_model import draw


@dataclass(frozen=True)
class Sleeps:
    """Seconds of one engine step, however many requests run, and of one transfer; requests that an engine runs."""

    step_s: float
    transfer_s: float
    max_running: int


class SleepingActor:
    """The trainer. Its weights have no bytes."""

    def __init__(self, sleeps: Sleeps) -> None:
        self.sleeps = sleeps

    @remote_method(Dispatch.RANK_ZERO)
    def offer_transfer(self, num_receivers: int) -> TransferAddress:
        return TransferAddress("", 0, 1, num_receivers)

    @remote_method(Dispatch.ONE_TO_ALL)
    def join_transfer(self, address: TransferAddress) -> str:
        return ""

    @remote_method(Dispatch.ONE_TO_ALL)
    def try_send_weights(self, version: int, holding: dict[int, int] | None = None) -> SendAttempt:
        time.sleep(self.sleeps.transfer_s)
        return SendAttempt(version)

    @remote_method(Dispatch.ONE_TO_ALL)
    def train(self, seconds: float) -> None:
        """One training step."""
        time.sleep(seconds)


class SleepingRollout:
    """One replica, with the requests that are in its engine: tokens that each lacks, in the order of their starts."""

    def __init__(self, sleeps: Sleeps, replica: int) -> None:
        self.sleeps, self.replica = sleeps, replica
        self.remaining: dict[int, int] = {}

    @remote_method(Dispatch.ONE_TO_ALL)
    def enter(self) -> None:
        pass

    @remote_method(Dispatch.ONE_TO_ALL)
    def join_transfer(self, address: TransferAddress) -> str:
        return ""

    @remote_method(Dispatch.REPLICAS, phase="gen")
    def advance(self, slices: dict[int, Slice]) -> SliceReport:
        """Sleep for the engine steps of this replica's slice. Raises KeyError for a drop of what is not there."""
        start, one = time.time(), slices[self.replica]
        for request in one.drops:
            del self.remaining[request]
        for new in one.starts:
            length, *drawn = new.token_ids
            self.remaining[new.request] = length - len(drawn)
        drawing = draw(self.remaining, one.num_steps, self.sleeps.max_running)
        time.sleep(drawing.num_steps * self.sleeps.step_s)
        finished = set(drawing.finished)
        report = {}
        for request, num in drawing.drawn.items():
            report[request] = Drawn((1,) * num, (-1.0,) * num, FINISHED_BY_STOP if request in finished else "")
            self.remaining[request] -= num
        for request in finished:
            del self.remaining[request]
        return SliceReport(self.replica, one.version, drawing.num_steps, report, start, time.time())


class SleepingHost:
    """host_class of a cluster. `build` of a rollout begins it anew, with an empty engine."""

    def __init__(self, sleeps: Sleeps, pool: str) -> None:
        self.sleeps, self.place = sleeps, RankEnvironment.read()
        self.roles: dict[str, Any] = {ACTOR: SleepingActor(sleeps)}
        self.build(ROLLOUT)

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        rank, size = self.place.rank, self.place.world_size
        return Coordinates(rank, rank, size, True, 0, 1, rank == 0)

    @remote_method(Dispatch.ONE_TO_ALL)
    def build(self, name: str, transfer: TransferSettings | None = None) -> None:
        self.roles[name] = SleepingRollout(self.sleeps, self.place.replica)

    def run(self, role: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.roles[role], name)(*args, **kwargs)
