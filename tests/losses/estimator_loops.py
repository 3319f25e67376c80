"""Every advantage estimator as a loop over Python's floats. Not a test module."""

from __future__ import annotations

import math
import statistics

from ragged_rows import Batch

from megatron_rl.config.algorithm_keys import AlgorithmConfig


def whitened(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [0.0] * len(values)
    scale = (statistics.variance(values) + 1e-8) ** -0.5
    return [(value - statistics.fmean(values)) * scale for value in values]


def to_go(row: list[float], gamma: float) -> list[float]:
    return [sum(gamma**n * r for n, r in enumerate(row[t:])) for t in range(len(row))]


def of_answers(batch: Batch, advantage) -> list[float]:
    return [advantage(row) for row, length in enumerate(batch.lengths) for _ in range(length)]


def loop_grpo(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def advantage(row: int) -> float:
        group = [batch.totals[other] for other in batch.others(row)]
        centred = batch.totals[row] - (statistics.fmean(group) if len(group) > 1 else 0.0)
        if not config.norm_adv_by_std_in_grpo:
            return centred
        return centred / ((statistics.stdev(group) if len(group) > 1 else 1.0) + 1e-6)

    return of_answers(batch, advantage)


def loop_rloo(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def advantage(row: int) -> float:
        rest = [batch.totals[other] for other in batch.others(row) if other != row]
        return batch.totals[row] - (statistics.fmean(rest) if rest else 0.0)

    return of_answers(batch, advantage)


def loop_opo(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def advantage(row: int) -> float:
        tokens = [batch.totals[other] for other in batch.others(row) for _ in range(batch.lengths[other])]
        return batch.totals[row] - (statistics.fmean(tokens) if len(batch.others(row)) > 1 else 0.0)

    return of_answers(batch, advantage)


def loop_reinforce(batch: Batch, config: AlgorithmConfig) -> list[float]:
    return whitened([value for row in batch.rewards for value in to_go(row, config.gamma)])


def minus_mean(batch: Batch, row: int) -> float:
    group = [batch.totals[other] for other in batch.others(row)]
    return batch.totals[row] - (statistics.fmean(group) if len(group) > 1 else 0.0)


def loop_baseline(batch: Batch, config: AlgorithmConfig) -> list[float]:
    return whitened(of_answers(batch, lambda row: minus_mean(batch, row)))


def loop_remax(batch: Batch, config: AlgorithmConfig) -> list[float]:
    rows = zip(batch.rewards, batch.greedy, strict=True)
    return [value - greedy for row, greedy in rows for value in to_go(row, 1.0)]


def loop_gae(batch: Batch, config: AlgorithmConfig) -> list[float]:
    found = []
    for rewards, values in zip(batch.rewards, batch.values, strict=True):
        after = [*values[1:], 0.0][: len(values)]
        deltas = [r + config.gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
        found += to_go(deltas, config.gamma * config.lam)
    return whitened(found)


def loop_passk(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def advantage(row: int) -> float:
        group = sorted(batch.totals[other] for other in batch.others(row))
        if len(group) < 2 or batch.totals[row] < group[-1] or group[-1] == group[-2]:
            return 0.0
        return (group[-1] - group[-2]) / (statistics.stdev(group) + 1e-6 if config.norm_adv_by_std_in_grpo else 1)

    return of_answers(batch, advantage)


def loop_gpg(batch: Batch, config: AlgorithmConfig) -> list[float]:
    alpha = len(batch.totals) / max(sum(total != 0 for total in batch.totals), 1)
    return of_answers(batch, lambda row: alpha * minus_mean(batch, row))


def loop_gdpo(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def advantage(row: int) -> float:
        total = 0.0
        for k, weight in enumerate(config.gdpo_reward_weights or (1, 1)):
            group = [batch.components[other][k] for other in batch.others(row)]
            centred = batch.components[row][k] - (statistics.fmean(group) if len(group) > 1 else 0.0)
            std = (statistics.stdev(group) if len(group) > 1 else 1.0) + 1e-6
            equal = len(group) > 1 and min(group) == max(group)
            total += 0.0 if equal else weight * centred / (std if config.norm_adv_by_std_in_grpo else 1)
        return total

    return whitened(of_answers(batch, advantage))


def loop_max_rl(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def advantage(row: int) -> float:
        group = [batch.totals[other] for other in batch.others(row)]
        mean = statistics.fmean(group)
        if len(group) == 1:
            return batch.totals[row]
        return (batch.totals[row] - mean) / (mean + 1e-6) if mean > 1e-9 else 0.0

    return of_answers(batch, advantage)


def loop_gigpo(batch: Batch, config: AlgorithmConfig) -> list[float]:
    """Every answer is one turn. GRPO among all answers, plus GRPO among the answers that have a token."""

    def of_turn(row: int) -> float:
        group = [batch.totals[other] for other in batch.others(row) if batch.lengths[other]]
        if len(group) < 2:
            return 0.0
        centred = batch.totals[row] - statistics.fmean(group)
        return centred / (statistics.stdev(group) + 1e-6) if config.norm_adv_by_std_in_grpo else centred

    return [a + b for a, b in zip(loop_grpo(batch, config), of_answers(batch, of_turn), strict=True)]


def loop_token_baseline(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def energy(row: int, t: int) -> float:
        columns = zip(batch.probs[row], batch.squares[row], batch.weights[row], strict=True)
        return sum((1 - 2 * p + square) * weight**2 for p, square, weight in list(columns)[: t + 1])

    found = []
    for row, rewards in enumerate(batch.rewards):
        for t in range(len(rewards)):
            there = [other for other in batch.others(row) if t < batch.lengths[other]]
            weights = [energy(other, t) for other in there]
            returns = [sum(batch.rewards[other][t:]) for other in there]
            baseline = sum(w * g for w, g in zip(weights, returns, strict=True)) / (sum(weights) + 1e-8)
            found.append(sum(rewards[t:]) - (baseline if len(there) > 1 else 0.0))
    return found


def loop_online_dpo(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def ratio(row: int) -> float:
        return sum(math.log(p) - value for p, value in zip(batch.probs[row], batch.values[row], strict=True))

    def advantage(row: int) -> float:
        group = batch.others(row)
        best, worst = (choose(group, key=lambda other: batch.totals[other]) for choose in (max, min))
        if row not in (best, worst) or batch.totals[best] == batch.totals[worst]:
            return 0.0
        weight = config.online_dpo_beta / (1 + math.exp(config.online_dpo_beta * (ratio(best) - ratio(worst))))
        return len(group) * weight * (1 if row == best else -1)

    return of_answers(batch, advantage)


LOOPS = {
    "gae": loop_gae,
    "grpo": loop_grpo,
    "grpo_vectorized": loop_grpo,
    "rloo": loop_rloo,
    "rloo_vectorized": loop_rloo,
    "opo": loop_opo,
    "grpo_passk": loop_passk,
    "gdpo": loop_gdpo,
    "gpg": loop_gpg,
    "max_rl": loop_max_rl,
    "gigpo": loop_gigpo,
    "online_dpo": loop_online_dpo,
    "optimal_token_baseline": loop_token_baseline,
    "tir_optimal_token_baseline": loop_token_baseline,
    "reinforce_plus_plus": loop_reinforce,
    "reinforce_plus_plus_baseline": loop_baseline,
    "remax": loop_remax,
}
