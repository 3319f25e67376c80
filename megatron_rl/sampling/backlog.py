"""The requests that are not trained yet, their answers, and the decider that hands them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_rl.records import Batch, Prompts
from megatron_rl.rollout.slices import Slice, SliceReport
from megatron_rl.sampling.open_answers import OpenAnswers
from megatron_rl.sampling.rules import Decider, Order


class Backlog:
    """Turns orders into slices and reports into facts. Threads that share it need a lock of their own.

    engines: replica -> requests in its engine. reports: those of finished slices, without tokens, for metrics.
    """

    def __init__(self, decider: Decider, answers: OpenAnswers, num_replicas: int) -> None:
        self.decider, self.answers = decider, answers
        self.engines: list[set[int]] = [set() for _ in range(num_replicas)]
        self.reports: list[SliceReport] = []
        self.apply_decisions()  # a checkpoint may have left some

    def next_slice(self, replica: int) -> Slice | None:
        """The next slice of a replica, which must be sent to it; None: there is none yet."""
        order = self.decider.next_order(replica)
        return None if order is None else self._slice(order)

    def done(self, report: SliceReport) -> None:
        """Take a replica's report. Raises RuntimeError for a slice that never began although its weights were
        announced.
        """
        if report.broken:
            raise RuntimeError(f"replica {report.replica} lacks announced weights: {report.broken}")
        finished = [request for request, drawn in report.drawn.items() if drawn.finish]
        self.engines[report.replica] -= set(finished)
        self.answers.extend(report.drawn, report.version)
        counts: Mapping[int, int] = {request: len(drawn.token_ids) for request, drawn in report.drawn.items()}
        self.decider.slice_done(report.replica, report.num_steps, counts, finished)
        self.apply_decisions()
        self.reports.append(replace(report, drawn={}))

    def lost(self, replica: int) -> None:
        """A replica died, with its engine."""
        self.engines[replica].clear()
        self.decider.replica_lost(replica)
        self.apply_decisions()

    def batch(self, step: int) -> tuple[Prompts, Batch, Batch | None]:
        """Hand a complete batch to the trainer: prompts, answers, and greedy answers or None."""
        self.decider.step_taken(step)
        self.apply_decisions()
        self.answers.trained(step - 1)  # the batch itself is kept, in case its step is given up
        return self.answers.batch(step)

    def apply_decisions(self) -> None:
        """Change the answers as the decider has decided since the last call."""
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
