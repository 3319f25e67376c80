"""The user's own verdict on groups: a function gets the scored rows of a group, and returns whether it is trained."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from megatron_rl.config.algorithm_keys import FilterGroupsConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.user_functions import load_function
from megatron_rl.errors import RewardError
from megatron_rl.plain_values import describe_error, line_of_user, quote
from megatron_rl.records import Batch
from megatron_rl.scoring.group_function import Row
from megatron_rl.scoring.group_reward import rows_of_groups
from megatron_rl.scoring.scored_answers import ScoredAnswers
from megatron_rl.user_code.first_prints import PRINTS_FILE, FirstPrints
from megatron_rl.user_code.user_calls import USERS
from megatron_rl.user_code.work_processes import WorkProcesses, job_of
from megatron_rl.user_code.worker_supervisor import WorkerSettings

KEY = "algorithm.filter_groups.path"
FAILURES = ("raised", "timed_out", "crashed", "no_verdict")
"""How a verdict can fail: an exception, no result in time, a dead process, a result that is neither true nor false."""


@dataclass(frozen=True)
class GroupVerdict:
    """Whether a group is kept. failure: one of FAILURES, with its reason; then the group is not kept."""

    is_kept: bool
    failure: str = ""
    reason: str = ""


@dataclass(frozen=True)
class VerdictSource:
    """The function `name` in the file `path`. prints_file: for prints of the function after its first ones."""

    path: str
    name: str
    prints_file: str

    noun = "the group filter"
    timeout_key = "reward_model.timeout_s"
    unusable = "no_verdict"

    def load(self, passing: tuple[type[BaseException], ...] = ()) -> Callable[[list[Row]], GroupVerdict]:
        """Return the function as one that never raises, but for `passing`. Raises ConfigError as `load_function`."""
        function = load_function(self.path, KEY, self.name, ("rows",))
        getattr(function, "__globals__", {}).setdefault("print", FirstPrints(self.noun, self.prints_file))

        def judge(rows: list[Row]) -> GroupVerdict:
            try:
                return self._verdict(function(rows))
            except passing:
                raise
            except BaseException as error:
                return self.failed("raised", f"{self.noun} raised {describe_error(error)}{line_of_user(error)}")

        return judge

    def _verdict(self, result: Any) -> GroupVerdict:
        if type(result).__name__ in ("bool", "bool_"):  # numpy's is no subclass
            return GroupVerdict(bool(result))
        return self.failed(self.unusable, f"{self.noun} returned {quote(result)}; it must return True or False")

    def written(self, answer: GroupVerdict) -> list[Any]:
        """Return a verdict as JSON values."""
        return [answer.is_kept, answer.failure, answer.reason]

    def read(self, content: Any) -> GroupVerdict:
        """Return the verdict of `written`. Raises ValueError for anything else."""
        match content:
            case [bool(is_kept), str(failure), str(reason)] if failure in ("", *FAILURES) and not (is_kept and failure):
                return GroupVerdict(is_kept, failure, reason)
        raise ValueError(f"{content!r:.80}")

    def failed(self, kind: str, reason: str) -> GroupVerdict:
        """Return the verdict on a group whose process has failed."""
        return GroupVerdict(False, kind, reason)


class VerdictProcesses(WorkProcesses):
    """A context manager: inside it a process waits for groups."""

    def __init__(self, source: VerdictSource, timeout_s: float) -> None:
        """timeout_s: seconds a call may take."""
        super().__init__(WorkerSettings(source, 1, timeout_s))
        self._jobs = itertools.count()

    def judge(self, groups: Sequence[list[Row]]) -> list[GroupVerdict]:
        """Return a verdict on each group, in order. Raises RewardError as `take`."""
        jobs, verdicts = [next(self._jobs) for _ in groups], dict[int, GroupVerdict]()
        self.submit([job_of(job, rows) for job, rows in zip(jobs, groups, strict=True)])
        while len(verdicts) < len(jobs):
            verdicts.update(self.take(waits=True))
        return [verdicts[job] for job in jobs]


class VerdictHere(contextlib.nullcontext[Any]):
    """Replaces `VerdictProcesses` in a run that is one process. Nothing ends a call that takes too long."""

    def __init__(self, source: VerdictSource) -> None:
        super().__init__(self)
        self._judge = source.load(passing=USERS)

    def judge(self, groups: Sequence[list[Row]]) -> list[GroupVerdict]:
        """Return a verdict on each group, in order."""
        return [self._judge(rows) for rows in groups]


class UserVerdicts:
    """Judges groups by the user's function. A context manager, as its processes are."""

    def __init__(
        self, processes: VerdictProcesses | VerdictHere, warn: Callable[[str], None], stop_if_all_failed: bool = True
    ) -> None:
        self._processes, self._warn, self._stops = processes, warn, stop_if_all_failed
        self._counts: Counter[str] = Counter()
        self._stops_by_step = False

    def judges_single_groups(self) -> None:
        """From now on a step whose verdicts all fail ends the run, and not a call, which may judge a single group."""
        self._stops, self._stops_by_step = False, self._stops

    def __enter__(self) -> Self:
        """Start the processes."""
        self._processes.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        """End the processes."""
        self._processes.__exit__(*failure)

    def __call__(self, groups: Sequence[list[Row]]) -> list[bool]:
        """Return whether each group is kept: rows as `scored_rows` returns them. A group without rows is not.

        Counts verdicts, and warns of failed ones. Raises RewardError if all fail, unless that is allowed.
        """
        judged = [rows for rows in groups if rows]
        verdicts = self._processes.judge(judged)
        failed = [verdict for verdict in verdicts if verdict.failure]
        self._counts.update(verdict.failure or ("kept" if verdict.is_kept else "dropped") for verdict in verdicts)
        if failed:
            told = f"{len(failed)} of {len(verdicts)} verdicts on groups failed; the first: {failed[0].reason}"
            if len(failed) == len(verdicts) and self._stops:
                raise RewardError(f"{told} ({KEY})")
            self._warn(told)
        by_group = iter(verdicts)
        return [bool(rows) and next(by_group).is_kept for rows in groups]

    def metrics(self) -> dict[str, float]:
        """Return the share of kept groups since the last call, and the number of failed verdicts by kind. Raises
        RewardError where all have failed in `judges_single_groups`.
        """
        counts, self._counts = self._counts, Counter()
        num_failed = sum(counts[kind] for kind in FAILURES)
        if self._stops_by_step and 0 < num_failed == counts.total():
            raise RewardError(f"all {num_failed} verdicts on groups of a step failed ({KEY})")
        metrics = {f"filter_groups/{kind}": float(counts[kind]) for kind in FAILURES}
        return metrics | {"filter_groups/kept_ratio": counts["kept"] / max(counts.total(), 1)}


def keeps(verdicts: UserVerdicts, rows: Batch, scored: ScoredAnswers) -> torch.Tensor:
    """Return bool [B]: whether the group of each response is kept. Raises RewardError as `UserVerdicts`."""
    ids, index = rows["uid"].unique(return_inverse=True)
    groups: list[list[Row]] = [[] for _ in ids]
    for row, group in zip(scored_rows(rows, scored), index.tolist(), strict=True):
        groups[group] += [] if row is None else [row]
    return torch.tensor(verdicts(groups), dtype=torch.bool)[index]


def scored_rows(rows: Batch, scored: ScoredAnswers) -> list[Row | None]:
    """Return each response as the user's function gets it: the row of a reward function of groups, its score, its
    failure or "", and further values of the reward function; None for an episode that failed.
    """
    asked = zip(rows_of_groups(scored.samples, rows), scored.scores.tolist(), scored.outcomes, strict=True)
    return [
        None if row is None else outcome.extras | row | {"score": score, "failure": outcome.failure}
        for row, score, outcome in asked
    ]


def verdicts_of(config: RunConfig, warn: Callable[[str], None], is_local: bool) -> UserVerdicts | None:
    """Return the configured verdicts; None: groups are compared by their scores. Raises ConfigError where the function
    cannot be loaded. is_local: it is called in this process.
    """
    keys: FilterGroupsConfig = config.algorithm.filter_groups
    if not keys.enable or keys.path is None:
        return None
    prints_file = Path(config.trainer.default_local_dir).resolve() / PRINTS_FILE
    source = VerdictSource(keys.path, keys.name, str(prints_file))
    source.load()
    reward = config.reward_model
    processes = VerdictHere(source) if is_local else VerdictProcesses(source, reward.timeout_s)
    return UserVerdicts(processes, warn, reward.stop_if_all_failed)
