"""Decide which replica generates which requests with which weights, from counts alone: no tokens, clock or processes.

Facts come in: a slice is done, weights have arrived, a batch was taken, a replica died. Orders for slices go out.

- A request is one response, a version is the weights after that many steps. A replica holds one version, and takes a
  newer one, which it has received, at the start of an order.
- A replica owns a request from its first order until the request is finished; meanwhile the request is open. If the
  replica dies, the request waits, in front of all requests that no replica has had.
- A request is away between two turns: it has left the engine, and waits for the reply of its environment.
- In rounds (`ScheduleConfig.in_rounds`) orders are made for all replicas at once, when every order of the previous
  round is answered, from counts that do not depend on the order of facts. Version `due` is then the one to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron_rl.sampling.filtered_requests import FilteredRequests
from megatron_rl.sampling.load_balancing import by_expected_length, even_shares
from megatron_rl.sampling.requests import Request, Requests
from megatron_rl.sampling.schedule_types import (
    Counts,
    GroupSwap,
    Kind,
    Numbers,
    RequestDecision,
    ScheduleConfig,
    SliceOrder,
)
from megatron_rl.sampling.scheduled_replica import ScheduledReplica
from megatron_rl.sampling.verdicts import GroupVerdicts, NoVerdicts, Verdicts

COUNTS = ("renewed", "moved", "truncated", "resampled", "forgotten_tokens")


class Scheduler:
    """The schedule of a run, as a state machine: a `RequestScheduler`, which describes its methods. Wrong facts raise
    ValueError and change nothing.
    """

    def __init__(
        self,
        rules: ScheduleConfig,
        num_replicas: int,
        state: Mapping[str, Any] | None = None,
        expect: Callable[[int], int | None] | None = None,
    ) -> None:
        """Begin with living replicas, empty engines and version first_step - 1, or that of `state` if newer.

        state: from `state_dict`, also of another number of replicas; there may be decisions to take at once. expect:
        request -> its probable number of tokens, None if unknown, by which rounds spread requests over replicas.
        """
        self.rules = rules
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        first = rules.first_step - 1
        self._replicas = [ScheduledReplica(first, first) for _ in range(num_replicas)]
        self.verdicts: GroupVerdicts = NoVerdicts()
        self._requests = Requests(rules)
        if rules.kept_groups:
            self._requests = requests = FilteredRequests(rules)
            self.verdicts = Verdicts(requests, self.counts, self._last_open_batch, self._may_apply)
        self.groups = self._requests.groups
        self._announced, self._expect = first, expect
        self._planned: dict[int, SliceOrder] = {}
        self._decisions: list[RequestDecision] = []
        self.away: set[int] = set()
        self._owners: dict[int, ScheduledReplica] = {}
        self.admits = True
        if state is not None:
            self._load(state)

    # Questions

    def next_order(self, replica: int) -> SliceOrder | None:
        known = self._replicas[replica]
        if not known.is_alive or known.order is not None:
            return None
        if self.rules.in_rounds:
            if not self._is_round_open():
                self._plan_round()
            known.order = self._planned.pop(replica, None)
        else:
            known.order = self._order_at_once(replica)
        return known.order

    def is_complete(self, step: int) -> bool:
        return self._requests.is_complete(step)

    @property
    def _is_finished(self) -> bool:
        """Whether every request of the run is finished."""
        return self._requests.frontier > self.rules.num_steps_total

    def take_decisions(self) -> Sequence[RequestDecision]:
        decisions, self._decisions = self._decisions, []
        return decisions

    def wanted_version(self, replica: int) -> int | None:
        known = self._replicas[replica]
        if not known.is_alive or known.order is not None or self._is_round_open():
            return None
        if self.rules.in_rounds and self._waits_for_due():
            return self._due()
        batch = self._requests.next_batch()
        if known.owned or batch is None:
            return None
        head = self._requests.head()
        if (
            self._requests.may_start(head, known.ready)
            if head is not None
            else batch <= self.rules.last_batch(known.ready)
        ):
            return None
        return self.rules.needed_version(batch)

    def may_send(self, version: int) -> bool:
        """Whether weights may be sent now. In rounds it is too early while an earlier version, which all replicas take
        at a fixed place, has not been taken. Otherwise it is never too early.
        """
        if not self.rules.in_rounds or self._is_finished:
            return True
        due = self._due()
        return not self._planned and (due >= version or not self._behind(due))

    def may_save(self, step: int) -> bool:
        """Whether a run that resumes from a checkpoint after `step`, written now, generates the same as this one.

        In rounds this holds once all replicas wait for the version of `step` or a later one, so `version_ready(step)`
        must not be called before `saved(step)`. Without rounds it always holds.
        """
        if not self.rules.in_rounds or self._is_finished:
            return True
        return not self._is_round_open() and self._due() >= step and self._waits_for_due()

    def state_dict(self) -> dict[str, Any]:
        owners = {request: index for index, replica in enumerate(self._replicas) for request in replica.owned}
        return self._requests.state_dict() | {
            "versions": [[replica.held, replica.ready] for replica in self._replicas],
            "announced": self._announced,
            "counts": dict(self.counts),
            "away": sorted(self.away),
            "open": [
                [request, owners.get(request), known.num_tokens, known.attempt, known.version, known.late]
                for request, known in sorted(self._requests.open.items())
            ],
        }

    # Facts

    def slice_done(self, replica: int, num_steps: int, tokens: Counts, finished: Numbers, away: Numbers = ()) -> None:
        known = self._replicas[replica]
        order = known.order
        if order is None:
            raise ValueError(f"replica {replica} has no outstanding order")
        strangers = (set(tokens) | set(finished) | set(away)) - known.owned
        if strangers or min(tokens.values(), default=0) < 0:
            raise ValueError(
                f"replica {replica} does not run requests {sorted(strangers)}, or reports a negative number of tokens"
            )
        known.order = None
        for request, num in tokens.items():
            if num:
                self._requests.open[request].num_tokens += num
                self._requests.open[request].version = order.version
        known.inside.difference_update(finished, away)
        self.away.update(away)
        known.present.difference_update(away)
        for request in sorted(finished):
            self._finish(known, request)
        straggler, known.straggler = known.straggler, None
        if straggler is not None and straggler in known.present:
            self._act_on_straggler(known, straggler)
        self._let_verdicts_apply()

    def returned(self, request: int, is_finished: bool) -> None:
        if request not in self.away:
            raise ValueError(f"request {request} is not away: these are {sorted(self.away)}")
        self.away.remove(request)
        owner = self._owners.get(request)
        if is_finished:
            self._finish(owner, request)
        elif owner is None:
            self._give_back(request)
        else:
            owner.present.add(request)
        self._let_verdicts_apply()

    def sending(self, version: int) -> None:
        """`version` begins to overwrite weights that replicas have received and not taken; the held ones stay."""
        for replica in self._replicas:
            replica.ready = replica.held

    def version_ready(self, version: int) -> None:
        """All living replicas have received the weights of `version`; they take them with a later order."""
        self._announced = max(self._announced, version)
        for replica in self._replicas:
            if replica.is_alive:
                replica.ready = max(replica.ready, version)

    def step_taken(self, step: int) -> GroupSwap | None:
        """The trainer takes batch `step`; returns the swap that completes it, if it has late groups. Raises ValueError
        unless it is the next batch and complete.
        """
        if step != self._requests.taken + 1 or not self.is_complete(step):
            raise ValueError(
                f"step {step} cannot be taken: {self._requests.taken} was the last, complete={self.is_complete(step)}"
            )
        swap = self._requests.planned_swap(step) if self._requests.num_missing(step) else None
        if swap is not None:
            self._requests.swap_groups(swap)
            if self.rules.colocated:
                for replica in self._replicas:
                    replica.inside.clear()
        self._requests.take(step)
        return swap

    def saved(self, step: int, interrupted: bool = False) -> None:
        """A checkpoint after `step` was written: unfinished requests restart in their replica's next order.

        interrupted: instead, the engines did something else and are empty.
        """
        for replica in self._replicas:
            replica.renewed |= replica.present
            self.counts["renewed"] += len(replica.present)

    def replica_lost(self, replica: int) -> None:
        """The replica died: its requests go to the front of the queue; they keep their tokens only if `partial`.

        Those that are away and keep their tokens go there when they return.
        """
        known = self._replicas[replica]
        if not known.is_alive:
            raise ValueError(f"replica {replica} is dead already")
        for request in sorted(known.owned):
            self.counts["moved"] += 1
            del self._owners[request]
            if not (self.rules.partial and request in self.away):
                self.away.discard(request)
                self._give_back(request)
        self._planned.pop(replica, None)
        self._replicas[replica] = ScheduledReplica(known.held, known.ready, is_alive=False)
        self._let_verdicts_apply()

    def replica_back(self, replica: int, version: int) -> None:
        """The replica has restarted; its engine is empty and has `version`, which should be the newest announced."""
        if self._replicas[replica].is_alive:
            raise ValueError(f"replica {replica} is not dead")
        self._replicas[replica] = ScheduledReplica(version, version)

    # Handing out

    def _room(self, replica: ScheduledReplica) -> int:
        """Return how many more requests a replica takes: without `ahead` a whole batch, which its engine queues."""
        if not self.admits and not self.rules.in_rounds:  # in rounds they drain at their own places
            return 0
        most = self.rules.batch_rows if self.rules.ahead == 0 else self.rules.max_running + self.rules.max_queued
        return max(0, most - len(replica.present))

    def _version_at_once(self, replica: ScheduledReplica) -> int:
        """Return the version of its next slice, without rounds; without `partial` an open request keeps it."""
        return replica.ready if self.rules.partial or not replica.owned else replica.held

    def _starters(self, versions: Mapping[int, int]) -> list[int]:
        """Return the replicas that may start the first waiting request. versions: replica -> that of its next slice."""
        head = self._requests.head()
        if head is None:
            return []
        return [replica for replica, version in versions.items() if self._requests.may_start(head, version)]

    def _shares(self, starters: Sequence[int], num_waiting: int) -> list[int]:
        """Return how many of the waiting requests each of these replicas gets."""
        replicas = [self._replicas[index] for index in starters]
        return even_shares([len(r.owned) for r in replicas], [self._room(r) for r in replicas], num_waiting)

    def _own(self, replica: ScheduledReplica, requests: Sequence[int]) -> None:
        """Note that a replica has further requests, none of which is away."""
        replica.owned.update(requests)
        replica.present.update(requests)
        self._owners |= dict.fromkeys(requests, replica)

    def _order_at_once(self, replica: int) -> SliceOrder | None:
        """Hand out requests to a replica that asks for its next slice, and return the order; without rounds."""
        known = self._replicas[replica]
        version = self._version_at_once(known)
        if self._requests.head() is not None and self._room(known):
            # The replica that asks comes first, so that it wins if loads are equal.
            living = [replica, *(other for other, r in enumerate(self._replicas) if r.is_alive and other != replica)]
            starters = self._starters({other: self._version_at_once(self._replicas[other]) for other in living})
            if starters[:1] == [replica]:
                share = self._shares(starters, self._requests.num_waiting(version))[0]
                self._own(known, self._requests.hand_out(share, version))
        return self._order(replica, version, self._requests.taken + 1) if known.present else None

    def _order(self, replica: int, version: int, next_batch: int) -> SliceOrder:
        """Return the order that lets the engine of `replica` run what it owns under `version`.

        next_batch: the batch that the trainer waits for.
        """
        known = self._replicas[replica]
        if version != known.held:
            if self.rules.colocated:
                known.inside.clear()
            elif self.rules.recompute_kv:
                known.renewed |= known.owned & known.inside
                self.counts["renewed"] += len(known.owned & known.inside)
        drops = (known.inside - known.owned) | (known.inside & known.renewed)
        starts = known.present - (known.inside - drops)
        known.held = version
        known.inside = set(known.present)
        known.renewed = set()
        known.straggler = self._straggler(known, next_batch)
        return SliceOrder(replica, version, self.rules.slice_steps, tuple(sorted(starts)), tuple(sorted(drops)))

    # Rounds

    def _is_round_open(self) -> bool:
        """Whether a slice is outstanding, or a verdict, or a reply to a turn that rounds await."""
        return bool(self.verdicts.unjudged) or self._has_slices_or_turns()

    def _let_verdicts_apply(self) -> None:
        """Let verdicts on groups take effect, if they may now."""
        if isinstance(self.verdicts, Verdicts):
            self.verdicts.apply()

    def _may_apply(self) -> bool:
        """In rounds all verdicts take effect at the end of a round, so that their times do not matter."""
        if not (self.rules.in_rounds and isinstance(self._requests, FilteredRequests)):
            return True
        return self._requests.has_all_verdicts and not self._has_slices_or_turns()

    def _last_open_batch(self) -> int | None:
        """The last batch that replicas may start now, as orders depend on it; None between two rounds' ends."""
        if not self.rules.in_rounds:
            versions = [self._version_at_once(replica) for replica in self._replicas if replica.is_alive]
        elif self._is_round_open() or self._waits_for_due():
            return None
        else:
            versions = list(self._round_versions()[1].values())
        return self.rules.last_batch(max(versions)) if versions else None

    def _has_slices_or_turns(self) -> bool:
        is_awaited = bool(self.away) and self.rules.awaits_turns
        return is_awaited or bool(self._planned) or any(replica.order is not None for replica in self._replicas)

    def _due(self) -> int:
        """Return the version that all replicas should hold by now, in rounds; complete batches alone decide it."""
        latest = self._requests.frontier - 1 - self.rules.versions_late
        return max(latest // self.rules.sync_every * self.rules.sync_every, self.rules.first_step - 1)

    def _behind(self, due: int) -> list[ScheduledReplica]:
        """Return the replicas that must still take version `due`. One that came back with an older version after `due`
        was announced is left out: it cannot get it any more.
        """
        return [r for r in self._replicas if r.is_alive and r.held < due and (r.ready >= due or self._announced < due)]

    def _waits_for_due(self) -> bool:
        """Whether no round can begin before a version arrives."""
        behind = self._behind(self._due())
        drains = not self.rules.partial and any(replica.owned for replica in behind)
        return bool(behind) and not drains and self._announced < self._due()

    def _plan_round(self) -> None:
        """Make orders for all living replicas, unless a version must arrive first."""
        if self._waits_for_due():
            return
        versions, may_start = self._round_versions()
        starters = self._starters(may_start)
        newest = max((versions[index] for index in starters), default=0)
        shares = self._shares(starters, self._requests.num_waiting(newest) if starters else 0)
        if self._expect is not None and len({versions[index] for index in starters}) == 1:
            self._spread_by_length(starters, self._requests.hand_out(sum(shares), newest))
        else:
            for index, share in zip(starters, shares, strict=True):
                self._own(self._replicas[index], self._requests.hand_out(share, versions[index]))
        for index, version in versions.items():
            if self._replicas[index].present:
                self._planned[index] = self._order(index, version, self._requests.frontier)

    def _round_versions(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return replica -> the version of its slice in the next round, and those of replicas that may start requests.

        A replica that is behind takes version `due`; without `partial` it starts none until all requests of those
        behind are finished.
        """
        due = self._due()
        behind = self._behind(due)
        drains = not self.rules.partial and any(replica.owned for replica in behind)
        versions, may_start = {}, {}
        for index, replica in enumerate(self._replicas):
            if replica.is_alive:
                takes_due = replica in behind and not drains
                versions[index] = due if takes_due else replica.held
                if takes_due or replica not in behind:
                    may_start[index] = versions[index]
        return versions, may_start

    def _spread_by_length(self, starters: Sequence[int], requests: Sequence[int]) -> None:
        """Give each replica whole groups of these requests, so that all end at about the same time.

        An unknown length counts as the mean of the known ones.
        """
        assert self._expect is not None
        size, replicas = self.rules.group_size, [self._replicas[index] for index in starters]
        groups = [list(group) for _, group in groupby(requests, lambda request: request // size)]
        of_groups = [self._expect(group[0]) for group in groups]
        of_owned = {request: self._expect(request) for replica in replicas for request in sorted(replica.owned)}
        known = [length for length in [*of_groups, *of_owned.values()] if length is not None]
        mean = sum(known) / len(known) if known else 1.0
        left = {
            request: max(0.0, (mean if length is None else length) - self._requests.open[request].num_tokens)
            for request, length in of_owned.items()
        }
        loads = [sum(left[request] for request in sorted(replica.owned)) for replica in replicas]
        expected = [mean if length is None else length for length in of_groups]
        parts = by_expected_length(groups, expected, loads, [self._room(replica) for replica in replicas])
        for replica, part in zip(replicas, parts, strict=True):
            self._own(replica, part)

    # Ends of requests

    def _finish(self, replica: ScheduledReplica | None, request: int) -> None:
        self._requests.finish(request)
        if replica is not None:
            del self._owners[request]
            replica.owned.remove(request)
            replica.present.discard(request)
            replica.renewed.discard(request)

    def _straggler(self, replica: ScheduledReplica, next_batch: int) -> int | None:
        """Return the last unfinished request of `next_batch` if the replica runs it; None: the policy is to wait."""
        is_last = next_batch == self._requests.frontier and self._requests.num_missing(next_batch) == 1
        if self.rules.straggler_policy == "wait" or not is_last or self.is_complete(next_batch):
            return None
        return next((request for request in replica.present if self.groups.batch_of(request) == next_batch), None)

    def _act_on_straggler(self, replica: ScheduledReplica, request: int) -> None:
        """Count one more slice that has not finished the request, and apply the policy at the limit."""
        known = self._requests.open[request]
        known.late += 1
        if known.late < self.rules.straggler_slices:
            return
        if self.rules.straggler_policy == "resample" and known.attempt < self.rules.straggler_attempts:
            known.attempt += 1
            self.counts["resampled"] += 1
            self._forget(request, "resample")
            replica.renewed.add(request)
        elif known.num_tokens:
            self.counts["truncated"] += 1
            self._decisions.append(RequestDecision("truncate", request, known.attempt))
            self._finish(replica, request)

    def _forget(self, request: int, kind: Kind) -> None:
        """Let an open request begin again, without its tokens."""
        known = self._requests.open[request]
        self.counts["forgotten_tokens"] += known.num_tokens
        known.num_tokens = known.late = 0
        self._decisions.append(RequestDecision(kind, request, known.attempt))

    def _give_back(self, request: int) -> None:
        """Let an open request wait for another replica; without `partial` its tokens are lost."""
        if not self.rules.partial and self._requests.open[request].num_tokens:
            self._forget(request, "forget")
        self._requests.give_back(request)

    # Restoring

    def _load(self, state: Mapping[str, Any]) -> None:
        self._requests.load(state, {entry[0]: Request(*entry[2:]) for entry in state["open"]})
        self._announced = max(state["announced"], self._announced)
        self.counts |= state["counts"]
        self.away = set(state.get("away", ()))
        for replica, (held, ready) in zip(self._replicas, state["versions"], strict=False):
            replica.held, replica.ready = max(held, replica.held), max(ready, replica.ready)
        for request, owner, *_ in state["open"]:
            self._load_owner(request, owner)

    def _load_owner(self, request: int, owner: int | None) -> None:
        """Leave the request with its replica if that may continue it, else give it back."""
        replica = self._replicas[owner] if owner is not None and owner < len(self._replicas) else None
        if replica is None or self.groups.batch_of(request) > self.rules.last_batch(replica.held):
            if not (self.rules.partial and request in self.away):
                self.away.discard(request)
                self._give_back(request)
            return
        known = self._requests.open[request]
        if not self.rules.partial and known.num_tokens and known.version != replica.held:
            self.away.discard(request)
            self._forget(request, "forget")
        self._own(replica, [request])
        if request in self.away:
            replica.present.remove(request)
