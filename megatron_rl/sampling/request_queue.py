"""The requests that are not trained yet, their responses, and the scheduler that hands them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron_rl.agents.episode import Reply
from megatron_rl.agents.episodes import Episodes
from megatron_rl.images import Pieces
from megatron_rl.records import Batch
from megatron_rl.rollout.slices import FINISHED_BY_LENGTH, Slice, SliceReport
from megatron_rl.sampling.in_flight import InFlightBatches
from megatron_rl.sampling.request_scheduler import RequestScheduler
from megatron_rl.sampling.response_history import LengthHistory, longest_first
from megatron_rl.sampling.schedule_types import GroupsJoined, SliceOrder
from megatron_rl.scoring.rule import Ended


class RequestQueue:
    """Turns orders into slices and reports into facts. Threads that share it need a lock of their own.

    keeps_prefixes: of slices, see `Slice`. on_end: is called with every response that ends by itself.
    engines: replica -> requests in its engine. reports: those of finished slices, without tokens, for metrics.
    episodes: answers turns; None: the first turn of a request is its last. num_late: requests of the batch taken last
    that were late, and left it. lengths: with them engines begin the longest requests first. begin_groups: adds groups
    that join batches to the responses; None: all exist when their batch begins. judge: gives verdicts that need no
    wait; returns whether there was one. has_features: whether engines can be given these images; replies that show
    others are kept in `unread` until they can.
    """

    def __init__(
        self, scheduler: RequestScheduler, answers: InFlightBatches, num_replicas: int, episodes: Episodes | None = None
    ) -> None:
        self.scheduler, self.answers, self.episodes = scheduler, answers, episodes
        self.engines: list[set[int]] = [set() for _ in range(num_replicas)]
        self.reports: list[SliceReport] = []
        self.keeps_prefixes = False
        self.on_end: Callable[[Ended], None] | None = None
        self.num_late = 0
        self.lengths: LengthHistory | None = None
        self.begin_groups: Callable[[Sequence[GroupsJoined]], None] | None = None
        self.judge: Callable[[], bool] = lambda: False
        self.has_features: Callable[[Pieces], bool] = lambda pieces: True
        self.unread: list[tuple[int, Reply]] = []
        self._beginning: set[int] = set()
        self.apply_decisions()  # a checkpoint may have left some
        for request in answers.away:
            self._submit(request)

    def next_slice(self, replica: int) -> Slice | None:
        """The next slice of a replica, which must be sent to it; None: there is none yet."""
        self.open_groups()
        if self.begin_groups is not None and not self.is_begun:
            return None
        order = self.scheduler.next_order(replica)
        return None if order is None else self._slice(order)

    def open_groups(self) -> None:
        """Begin the groups that a batch needs as verdicts are so far; nothing where none are given."""
        if self.begin_groups is not None:
            self.scheduler.verdicts.open_groups()
            if joined := self.scheduler.verdicts.take_joined():
                self.begin_groups(joined)
                self.begin_episodes()

    def done(self, report: SliceReport) -> None:
        """Take a replica's report. Raises RuntimeError for a slice that never began although its weights were
        announced.
        """
        if report.broken:
            raise RuntimeError(f"replica {report.replica} did not receive announced weights: {report.broken}")
        ended = [request for request, drawn in report.drawn.items() if drawn.finish]
        self.engines[report.replica] -= set(ended)
        away = self.answers.extend(report.drawn, report.version)
        finished = [request for request in ended if request not in away]
        counts: Mapping[int, int] = {request: len(drawn.token_ids) for request, drawn in report.drawn.items()}
        self.scheduler.slice_done(report.replica, report.num_steps, counts, finished, away)
        self.apply_decisions()
        self.reports.append(replace(report, drawn={}))
        for request in away:
            if self.answers.episode(request).waits:  # a schedule that is repeated may drop its tokens here
                self._submit(request)
        self._end(finished)

    def begin_episodes(self) -> None:
        """Have environments begin the episodes that have the dataset's prompt alone; replies say how. No request of
        them may be handed out before `is_begun`.
        """
        if self.episodes is not None:
            unbegun = self.answers.unbegun.items()
            self._beginning |= self.episodes.submit_new({n: e for n, e in unbegun if n not in self._beginning})

    @property
    def is_begun(self) -> bool:
        """Whether no environment has still to begin an episode."""
        return not self._beginning

    @property
    def has_turns_open(self) -> bool:
        """Whether a turn waits for its reply."""
        return self.episodes is not None and self.episodes.is_open

    def take_replies(self, waits: bool = False) -> bool:
        """Take the replies to turns that exist; returns whether there was one. waits: until there is one, if a turn
        waits for its reply.
        """
        waits &= not self.unread
        replies = [] if self.episodes is None else self.episodes.take(waits and self.episodes.is_open)
        arrived, self.unread = [*self.unread, *replies], []
        for request, reply in arrived:
            if not self.has_features(reply.images):
                self.unread.append((request, reply))
                continue
            if reply.turn is None:
                self.answers.episode(request).begin(reply)
                self._beginning.discard(request)
                continue
            is_finished = self.answers.take(request, reply)
            if self.answers.episode(request).waits:
                self._submit(request)
                continue
            self.scheduler.returned(request, is_finished)
            self.apply_decisions()
            if is_finished:
                self._end([request])
        return len(self.unread) < len(arrived) or bool(replies)

    def lost(self, replica: int) -> None:
        """A replica died, with its engine."""
        self.engines[replica].clear()
        self.scheduler.replica_lost(replica)
        self.apply_decisions()

    def batch(self, step: int) -> tuple[Batch, Batch | None]:
        """Hand a complete batch to the trainer: its rows, and greedy responses or None."""
        swap = self.scheduler.step_taken(step)
        self.num_late = 0 if swap is None else len(swap.late)
        self.apply_decisions()
        self.answers.trained(step - 1)  # the batch itself is kept, in case its step is given up
        return self.answers.batch(step)

    def apply_decisions(self) -> None:
        """Change the answers as the scheduler has decided since the last call."""
        for decision in self.scheduler.take_decisions():
            episode = self.answers.episode(decision.request)
            match decision.kind:
                case "truncate":
                    self._truncate(decision.request)
                case "resample":
                    episode.resample()
                case "forget":
                    episode.forget()
            self._forget([decision.request])

    def _truncate(self, request: int) -> None:
        """End a straggler with its tokens so far. Where its environment hears of it, this waits for the grade: the
        trainer waits for nothing else.
        """
        episodes, episode = self.episodes, self.answers.episode(request)
        is_told = episodes is not None and episodes.hears_cut(request)
        episode.truncate(is_told)
        if episodes is not None and is_told:
            episodes.submit(request, episode)
            ((_, reply),) = episodes.take_of({request}, waits=True)
            self.answers.take(request, reply, is_last=True)

    def _end(self, finished: Sequence[int]) -> None:
        self._forget(finished)
        if self.on_end is not None:
            for request in finished:
                episode = self.answers.episode(request)
                # A schedule that is repeated may have dropped its tokens.
                if episode.finish and episode.failure is None:
                    self.on_end(self._ended(request))

    def _ended(self, request: int) -> Ended:
        episode = self.answers.episode(request)
        reward = None if self.episodes is None else episode.reward
        ended = (len(episode.log_probs), episode.finish == FINISHED_BY_LENGTH, reward)
        return Ended(request, episode.row, episode.token_ids, episode.group, *ended)

    def _forget(self, requests: Sequence[int]) -> None:
        """Drop the environments of requests that have ended or begin again."""
        if self.episodes is not None:
            for request in requests:
                self.episodes.forget(request)
            if self.unread:
                gone = set(requests)
                self.unread = [(request, reply) for request, reply in self.unread if request not in gone]

    def _submit(self, request: int) -> None:
        if self.episodes is None:
            raise RuntimeError("a turn waits for a reply, and nothing answers turns")
        self.episodes.submit(request, self.answers.episode(request))

    def _slice(self, order: SliceOrder) -> Slice:
        engine = self.engines[order.replica]
        drops = tuple(request for request in order.drops if request in engine)
        engine -= set(drops)
        engine |= set(order.starts)
        starts = tuple(self.answers.start(request) for request in self._in_order(order.starts))
        return Slice(order.version, order.num_steps, starts, drops, self.keeps_prefixes)

    def _in_order(self, requests: Sequence[int]) -> Sequence[int]:
        if self.lengths is None:
            return requests
        drawn = [len(self.answers.episode(request).token_ids) for request in requests]
        return longest_first(requests, [self.lengths.expected(request) for request in requests], drawn)
