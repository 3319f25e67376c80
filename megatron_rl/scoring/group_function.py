"""A reward function that gets all responses of a group at once: its rows, the call, and its outcomes. No torch."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_rl.config.reward_keys import CustomRewardFunctionConfig
from megatron_rl.plain_values import quote
from megatron_rl.scoring.function import RewardSource, is_async, load_reward_function
from megatron_rl.scoring.outcome import Outcome, RewardFunction, Sample, failed, outcome_of, raised

Row = dict[str, Any]
"""One response of a group, see `row_of`."""


class Group(NamedTuple):
    """The responses to one prompt, in the order of their samples. It is sent to another process, so it must pickle."""

    rows: list[Row]

    @property
    def solution(self) -> tuple[str, ...]:
        """The texts of the responses."""
        return tuple(row["solution_str"] for row in self.rows)


@dataclass(frozen=True)
class GroupFacts:
    """Entries of a row in addition to the sample. index: its prompt's row in the data. sample: its number among the
    prompt's samples. num_tokens: that the policy sampled. truncated: whether the longest length ended it.
    environment_reward: the sum over an episode's turns; None: nothing rewards turns.
    """

    index: int
    sample: int
    num_tokens: int
    truncated: bool
    environment_reward: float | None = None


def row_of(sample: Sample, facts: GroupFacts) -> Row:
    """Return a response as the user's function gets it."""
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    known = {name: value for name, value in vars(facts).items() if value is not None}
    return dict(zip(names, sample, strict=True)) | known


@dataclass(frozen=True)
class GroupRewardSource:
    """Where a function of groups comes from. The reply to a job is a list of outcomes, one for each row, or of a single
    failure, which is that of all rows.
    """

    source: RewardSource

    noun, timeout_key, unusable = RewardSource.noun, RewardSource.timeout_key, RewardSource.unusable

    def load(
        self, passing: tuple[type[BaseException], ...] = ()
    ) -> Callable[[Group], list[Outcome] | Awaitable[list[Outcome]]]:
        """Return what scores a group, as `RewardSource.load` returns what scores a sample."""
        function = load_reward_function(self.source, per_group=True)
        return functools.partial(score_group_later if is_async(function) else score_group, function, passing=passing)

    def written(self, answer: list[Outcome]) -> list[Any]:
        """Return outcomes as JSON values."""
        return [self.source.written(outcome) for outcome in answer]

    def read(self, content: Any) -> list[Outcome]:
        """Return the outcomes of `written`. Raises ValueError for anything else."""
        if not isinstance(content, list) or not content:
            raise ValueError(f"{content!r:.80}")
        return [self.source.read(outcome) for outcome in content]

    def failed(self, kind: str, reason: str) -> list[Outcome]:
        """Return the outcomes of a group whose process has failed."""
        return [failed(kind, reason)]

    def check(self, data_sources: Iterable[str]) -> None:
        """Load the function once; raises ConfigError."""
        load_reward_function(self.source, per_group=True)


def source_of(custom: CustomRewardFunctionConfig, prints_file: str) -> RewardSource | GroupRewardSource:
    """Return where the configured function comes from; its name must not be null. prints_file: as in `RewardSource`."""
    assert custom.name is not None
    source = RewardSource(custom.path, custom.name, custom.reward_kwargs, prints_file)
    return GroupRewardSource(source) if custom.per_group else source


def score_group(function: RewardFunction, group: Group, passing: tuple[type[BaseException], ...] = ()) -> list[Outcome]:
    """Call `function` with the rows of a group. Everything that it returns or raises becomes outcomes, as in
    `score_sample`; passing: as there.
    """
    try:
        return _outcomes(function(list(group.rows)), len(group.rows))
    except passing:
        raise
    except BaseException as error:
        return [raised(error)]


async def score_group_later(
    function: RewardFunction, group: Group, passing: tuple[type[BaseException], ...] = ()
) -> list[Outcome]:
    """Call an `async` function and wait for it. Arguments and outcomes are those of `score_group`."""
    try:
        return _outcomes(await function(list(group.rows)), len(group.rows))
    except passing:
        raise
    except BaseException as error:
        return [raised(error)]


def _outcomes(results: Any, num_rows: int) -> list[Outcome]:
    if not isinstance(results, list | tuple) or len(results) != num_rows:
        what = f"{len(results)} values" if isinstance(results, list | tuple) else "an object that is no list"
        must = f"it must return a list with a score for each of the {num_rows} rows, in their order"
        return [failed("no_score", f"the reward function returned {what}, {quote(results)}; {must}")]
    return [outcome_of(result) for result in results]
