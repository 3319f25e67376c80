"""Questions to the policy outside of the schedule, which are no prompts of the run: it judges its own responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_rl.cluster.routing import chunk_sizes
from megatron_rl.images import Pieces
from megatron_rl.rollout.slices import Drawn, SliceReport, Start


class PolicyQuestions:
    """Requests that are asked now. A slice generates until none is left; one that is lost is asked again, in full."""

    def __init__(self, starts: Sequence[Start]) -> None:
        self._starts = {start.request: start for start in starts}
        self.replies: dict[int, Drawn] = {}

    @property
    def unread(self) -> list[Pieces]:
        """Images without features: a question to a judge has none."""
        return []

    @property
    def is_answered(self) -> bool:
        """Whether every question has its reply."""
        return len(self.replies) == len(self._starts)

    def shares(self, num_replicas: int) -> list[tuple[Start, ...]]:
        """The questions without a reply, one share for each replica, of contiguous ones."""
        rows, shares, first = [start for name, start in self._starts.items() if name not in self.replies], [], 0
        for size in chunk_sizes(len(rows), num_replicas):
            shares.append(tuple(rows[first : first + size]))
            first += size
        return shares

    def note(self, reports: Iterable[SliceReport]) -> None:
        """Take the replies of slices that ran to their end."""
        for report in reports:
            self.replies |= report.drawn

    def take_replies(self, waits: bool) -> None:
        """Do nothing: a judge has no environment."""
