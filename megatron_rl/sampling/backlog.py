"""What is drawn for the coming steps: the requests, their answers, and what decides about both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_rl.records import Generations, Prompts
from megatron_rl.rollout.slices import Slice, SliceReport
from megatron_rl.sampling.open_answers import OpenAnswers
from megatron_rl.sampling.rules import Decides, Order


class Backlog:
    """Orders become slices, reports become facts. Whoever shares it between threads has a lock of its own.

    engines: replica -> requests that its engine has. ran: reports of slices, without what they drew.
    """

    def __init__(self, decider: Decides, answers: OpenAnswers, num_replicas: int) -> None:
        self.decider, self.answers = decider, answers
        self.engines: list[set[int]] = [set() for _ in range(num_replicas)]
        self.ran: list[SliceReport] = []
        self.act()  # what a checkpoint left to be decided

    def next_slice(self, replica: int) -> Slice | None:
        """What a replica does next; None: nothing yet. Its engine will have been told once this was called."""
        order = self.decider.next_order(replica)
        return None if order is None else self._slice(order)

    def done(self, report: SliceReport) -> None:
        """A replica has answered. Raises RuntimeError for a slice that was not begun: its weights were announced."""
        if report.broken:
            raise RuntimeError(f"replica {report.replica} lacks announced weights: {report.broken}")
        finished = [request for request, drawn in report.drawn.items() if drawn.finish]
        self.engines[report.replica] -= set(finished)
        self.answers.extend(report.drawn, report.version)
        counts: Mapping[int, int] = {request: len(drawn.token_ids) for request, drawn in report.drawn.items()}
        self.decider.slice_done(report.replica, report.num_steps, counts, finished)
        self.act()
        self.ran.append(replace(report, drawn={}))

    def lost(self, replica: int) -> None:
        """A replica died, with its engine."""
        self.engines[replica].clear()
        self.decider.replica_lost(replica)
        self.act()

    def batch(self, step: int) -> tuple[Prompts, Generations, Generations | None]:
        """A complete batch, which the trainer takes: prompts, answers, greedy answers where there are such."""
        self.decider.step_taken(step)
        self.act()
        self.answers.trained(step - 1)  # the batch itself is kept, for a step that is given up
        return self.answers.batch(step)

    def act(self) -> None:
        """Do what was decided of requests."""
        for decision in self.decider.take_decisions():
            match decision.kind:
                case "truncate":
                    self.answers.truncate(decision.request)
                case "resample":
                    self.answers.resample(decision.request)
                case "forget":
                    self.answers.forget([decision.request])

    def _slice(self, order: Order) -> Slice:
        engine = self.engines[order.replica]
        drops = tuple(request for request in order.drops if request in engine)
        engine -= set(drops)
        engine |= set(order.starts)
        starts = tuple(self.answers.start(request) for request in order.starts)
        return Slice(order.version, order.num_steps, starts, drops)
