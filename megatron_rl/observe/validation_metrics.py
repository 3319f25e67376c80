"""verl's `val-core/` and `val-aux/` metrics, from scored validation samples. Pure.

Legend: n samples of each prompt; k <= n of them drawn with replacement, as verl's bootstrap draws them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

CORE_KINDS = ("mean", "maj", "best")
NUM_VOTES = 1000
"""Draws of k samples over which a majority vote is averaged."""


def validation_metrics(
    data_sources: Sequence[str],
    prompts: Sequence[int],
    variables: Mapping[str, Sequence[float | None]],
    predictions: Sequence[str | None],
) -> dict[str, float]:
    """`val-core/<source>/<variable>/<kind>@<k>...`, averaged over the prompts of each source.

    All sequences have one element per sample; samples with the same element of `prompts` belong together. A row whose
    value of a variable is None does not count for it. `val-core` has the variable "acc", or "reward" where there is no
    "acc", of all n samples; the rest is `val-aux`.
    """
    core = "acc" if "acc" in variables else "reward"
    rows_of: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, prompt) in enumerate(zip(data_sources, prompts, strict=True)):
        rows_of[source][prompt].append(row)
    metrics = {}
    for source, groups in sorted(rows_of.items()):
        n = max(len(rows) for rows in groups.values())
        for name, values in variables.items():
            for metric, value in _source_metrics(list(groups.values()), values, predictions, n).items():
                is_core = name == core and metric.startswith(CORE_KINDS) and f"@{n}" in metric
                metrics[f"val-{'core' if is_core else 'aux'}/{source}/{name}/{metric}"] = value
    return metrics


def subset_sizes(n: int) -> list[int]:
    """2, 4, 8, ... and n, for best, worst and majority; [] where n = 1."""
    powers = [2**exponent for exponent in range(1, n.bit_length()) if 2**exponent < n]
    return [*powers, n] if n > 1 else []


def prompt_metrics(values: Sequence[float], n: int) -> dict[str, float]:
    """Metrics of one prompt's samples: mean@n, and for n > 1 std@n and best@k, worst@k with mean and std over draws.

    They are exact expectations over draws with replacement, where verl averages a thousand draws.
    """
    metrics = {f"mean@{n}": float(np.mean(values))}
    if n > 1:
        metrics[f"std@{n}"] = float(np.std(values))
    for k in subset_sizes(n):
        for kind, ordered in (("best", np.sort(values)), ("worst", -np.sort(-np.asarray(values)))):
            # The largest of k draws is among the first i in order with probability (i / N)^k.
            chances = np.diff((np.arange(len(values) + 1) / len(values)) ** k)
            mean = float(chances @ ordered)
            metrics[f"{kind}@{k}/mean"] = mean
            metrics[f"{kind}@{k}/std"] = float(np.sqrt(chances @ (ordered - mean) ** 2))
    return metrics


def majority_metrics(values: Sequence[float], votes: Sequence[str], n: int) -> dict[str, float]:
    """maj@k of one prompt: the value of the commonest vote among k drawn samples; the first drawn decides a tie.

    Mean and std over NUM_VOTES draws from a fixed seed.
    """
    number_of = {vote: number for number, vote in enumerate(dict.fromkeys(votes))}
    vote, value = np.array([number_of[text] for text in votes]), np.asarray(values, dtype=float)
    metrics: dict[str, float] = {}
    for k in subset_sizes(n):
        drawn = np.random.default_rng(42).integers(len(vote), size=(NUM_VOTES, k))
        draws = np.arange(NUM_VOTES)[:, None]
        counts = np.zeros((NUM_VOTES, len(number_of)), dtype=int)
        np.add.at(counts, (draws, vote[drawn]), 1)
        first_of_winner = counts[draws, vote[drawn]].argmax(axis=1)
        winners = value[drawn[draws[:, 0], first_of_winner]]
        metrics |= {f"maj@{k}/mean": float(winners.mean()), f"maj@{k}/std": float(winners.std())}
    return metrics


def _source_metrics(
    groups: Sequence[list[int]], values: Sequence[float | None], predictions: Sequence[str | None], n: int
) -> dict[str, float]:
    """The mean of each metric over the prompts that have it."""
    collected: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        of_prompt = [(value, predictions[row]) for row in group if (value := values[row]) is not None]
        if not of_prompt:
            continue
        metrics = prompt_metrics([value for value, _ in of_prompt], n)
        voters = [(value, vote) for value, vote in of_prompt if vote is not None]
        if voters:
            metrics |= majority_metrics([value for value, _ in voters], [vote for _, vote in voters], n)
        for name, value in metrics.items():
            collected[name].append(value)
    return {name: float(np.mean(per_prompt)) for name, per_prompt in collected.items()}
