"""The reward function of a run: one of a Python file of the user's, or a built-in one. No torch."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.declarations import REWARDS
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.user_functions import run_file
from megatron_rl.errors import ConfigError
from megatron_rl.scoring.built_in.by_data_source import rules_of_sources
from megatron_rl.scoring.outcome import (
    FAILURES,
    Outcome,
    RewardFunction,
    Sample,
    failed,
    score_sample,
    score_sample_later,
)
from megatron_rl.user_code.first_prints import show_first_prints

SIGNATURE = "(data_source, solution_str, ground_truth, extra_info=None)"
GROUP_SIGNATURE = "(rows)"


@dataclass(frozen=True)
class RewardSource:
    """Where the function comes from: `name` in the file `path`, or the built-in `name`; `kwargs` go to every call.

    prints_file: for prints of the function after its first ones; None: all is shown.
    """

    path: str | None
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    prints_file: str | None = None

    noun = "the reward function"
    timeout_key = "reward_model.timeout_s"
    unusable = "no_score"

    def load(self, passing: tuple[type[BaseException], ...] = ()) -> Callable[[Sample], Outcome | Awaitable[Outcome]]:
        """Return what scores a sample, later where the function is `async`. passing: as in `score_sample`. Raises
        ConfigError as `load_reward_function`.
        """
        function = load_reward_function(self)
        return functools.partial(score_sample_later if is_async(function) else score_sample, function, passing=passing)

    def written(self, answer: Outcome) -> list[Any]:
        """Return an outcome as JSON values."""
        return [answer.score, answer.extras, answer.failure, answer.reason]

    def read(self, content: Any) -> Outcome:
        """Return the outcome of `written`. Raises ValueError for anything else."""
        try:
            score, extras, failure, reason = content
            is_valid = isinstance(failure, str) and isinstance(reason, str) and isinstance(extras, dict)
            is_valid = is_valid and all(isinstance(value, str) or _is_finite(value) for value in extras.values())
            is_valid = is_valid and (failure in FAILURES and score is None if failure else _is_finite(score))
        except (ValueError, TypeError):
            is_valid = False
        if not is_valid:
            raise ValueError(f"{content!r:.80}")
        return Outcome(score, extras, failure, reason)

    def failed(self, kind: str, reason: str) -> Outcome:
        """Return the outcome of a sample whose process has failed."""
        return failed(kind, reason)

    def check(self, data_sources: Iterable[str]) -> None:
        """Load the function once, and see that a built-in one knows all `data_sources`; raises ConfigError."""
        load_reward_function(self)
        if self.path is None:
            check_built_in(self.name, data_sources)


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def load_reward_function(source: RewardSource, per_group: bool = False) -> RewardFunction:
    """Return the function, with its `kwargs` filled in.

    per_group: it gets the rows of a group; else the keywords data_source, solution_str, ground_truth, extra_info.
    Raises ConfigError if the file is missing or fails to run, has no such function, or if the function cannot be
    called with these arguments and the keywords of `kwargs`.
    """
    where = source.path or "built-in rewards"
    functions: dict[str, Any] = {name: rule.function for name, rule in REWARDS.items()}
    if source.path is not None:
        module = run_file(source.path, "custom_reward_function.path")
        functions = {key: value for key, value in vars(module).items() if callable(value)}
        if source.prints_file is not None:
            show_first_prints(module, source.noun, source.prints_file)
    if source.name not in functions:
        nearest = nearest_name(source.name, functions) if functions else None
        hint = f"did you mean: {nearest}" if nearest else "it defines no function"
        raise ConfigError(f"{where} has no function {source.name!r} (custom_reward_function.name); {hint}")
    function = functions[source.name]
    signature: inspect.Signature | str = ""
    try:
        signature = inspect.signature(function)
        arguments = {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": {}}
        signature.bind(*([[]] if per_group else []), **({} if per_group else arguments), **source.kwargs)
    except (TypeError, ValueError) as error:
        wanted = f"as {source.name}{GROUP_SIGNATURE}" if per_group else f"with the keywords of {source.name}{SIGNATURE}"
        raise ConfigError(
            f"{where}: {source.name}{signature} cannot be called {wanted} and "
            f"custom_reward_function.reward_kwargs={source.kwargs}: {error}"
        ) from error
    return functools.partial(function, **source.kwargs)


def is_async(function: RewardFunction) -> bool:
    """Whether a call must be awaited."""
    return inspect.iscoroutinefunction(function)


def check_built_in(name: str, data_sources: Iterable[str]) -> None:
    """Raise ConfigError if the rule `name` cannot judge a data source, or needs a package that is not installed."""
    sources = set(data_sources)
    rules = {name} if sources else set()
    if name == "compute_score":
        by_source = rules_of_sources()
        if unknown := sorted(sources - by_source.keys()):
            raise ConfigError(
                f"no built-in reward judges data source {unknown[0]!r} (custom_reward_function.path is null); "
                f"did you mean: {nearest_name(unknown[0], by_source)}; or set custom_reward_function.path to a file "
                "of your own, or custom_reward_function.name to exact_match or math for all sources"
            )
        rules = {by_source[source] for source in sources}
    for rule in sorted(rules):
        traits = REWARDS[rule].traits
        if traits.package is not None and importlib.util.find_spec(traits.package) is None:
            raise ConfigError(
                f"the built-in {rule} reward needs the package {traits.requirement.partition('[')[0]}, and it is not "
                f"installed: pip install '{traits.requirement}', or use custom_reward_function.name=exact_match"
            )
