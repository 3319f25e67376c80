"""Numbers of an evaluation, per data source, from recorded responses, with 95% intervals. Pure.

A response counts as right with an accuracy of 0.5 or more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.observe.validation_metrics import majority_metrics, subset_sizes

RIGHT = 0.5
Z_95 = 1.959964
ALL_SOURCES = "all"
"""The name of all sources together; with a source of this name it has asterisks around it."""

Row = Mapping[str, Any]
"""One recorded response: index, sample, data_source, score, and where a rule gave them acc and pred."""


class Estimate(NamedTuple):
    """A number with the ends of its 95% interval; NaN where one prompt says nothing about others."""

    value: float
    low: float
    high: float


def share_estimate(values: Sequence[float]) -> Estimate:
    """The mean of numbers in [0, 1], one per prompt, with Wilson's score interval (JASA 22, 1927).

    Where the numbers are not all 0 or 1 they vary less than those of a yes or no, and count as that many more of these:
    n p (1 - p) / variance, the effective sample size (Korn and Graubard, Survey Methodology 24, 1998).
    """
    mean, variance = float(np.mean(values)), float(np.var(values))
    n = len(values) * mean * (1 - mean) / variance if variance > 0 else len(values)
    z2 = Z_95**2
    middle = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half))


def mean_estimate(values: Sequence[float]) -> Estimate:
    """The mean of any numbers, one per prompt, with the normal interval, which one prompt does not have."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan)
    half = Z_95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """The chance that one of k responses, drawn without replacement from those of a prompt, is right.

    1 - C(n - c, k) / C(n, k): Chen et al., arXiv:2107.03374, section 2.1. Raises ValueError for more than n.
    """
    if k > num_answers:
        raise ValueError(f"pass@{k} needs {k} responses, and the prompt has {num_answers}")
    return 1 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def counts_of(num_answers: int) -> list[int]:
    """The k of pass@k and maj@k: 1, 2, 4, ... and the number of responses to a prompt."""
    return [1, *subset_sizes(num_answers)]


def evaluation_table(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Source, or `ALL_SOURCES` where there are several -> name -> number or Estimate.

    prompts, answers: counts. reward. With a rule: acc, the mean accuracy; pass@k; and where the rule also said how it
    understood a response, maj@k as `validation_metrics.majority_metrics` draws it. A prompt counts once, whatever
    number of responses it has; k stops at the smallest of these numbers.
    """
    groups: dict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["data_source"]][row["index"]].append(row)
    by_source = {source: list(prompts.values()) for source, prompts in sorted(groups.items())}
    if len(by_source) > 1:
        name = ALL_SOURCES
        while name in by_source:
            name = f"*{name}*"
        by_source[name] = [prompt for prompts in by_source.values() for prompt in prompts]
    return {source: _numbers(prompts) for source, prompts in by_source.items()}


def _numbers(prompts: Sequence[Sequence[Row]]) -> dict[str, Any]:
    numbers: dict[str, Any] = {"prompts": len(prompts), "answers": sum(map(len, prompts))}
    numbers["reward"] = mean_estimate([float(np.mean([row["score"] for row in rows])) for rows in prompts])
    if any(row.get("acc") is None for rows in prompts for row in rows):
        return numbers
    accuracies = [[float(row["acc"]) for row in rows] for rows in prompts]
    of_answers = [float(np.mean(values)) for values in accuracies]
    in_range = all(0 <= value <= 1 for values in accuracies for value in values)
    numbers["acc"] = (share_estimate if in_range else mean_estimate)(of_answers)
    most = min(map(len, prompts))
    for k in counts_of(most):
        chances = [pass_at_k(len(values), sum(value >= RIGHT for value in values), k) for values in accuracies]
        numbers[f"pass@{k}"] = share_estimate(chances)
    votes = [[str(row["pred"]) for row in rows if row.get("pred") is not None] for rows in prompts]
    if most > 1 and in_range and list(map(len, votes)) == list(map(len, prompts)):
        majorities = [majority_metrics(*pair, most) for pair in zip(accuracies, votes, strict=True)]
        for k in subset_sizes(most):
            numbers[f"maj@{k}"] = share_estimate([one[f"maj@{k}/mean"] for one in majorities])
    return numbers


def table_lines(table: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Rows of the table as text: source with its prompts and responses, name, value, interval."""
    rows = []
    for source, numbers in table.items():
        title = f"{source}: {numbers['prompts']} prompts, {numbers['answers']} responses"
        for name, value in numbers.items():
            if isinstance(value, Estimate):
                interval = "unknown" if math.isnan(value.low) else f"{value.low:.4f} to {value.high:.4f}"
                rows.append((title, name, f"{value.value:.4f}", interval))
                title = ""
    return rows
