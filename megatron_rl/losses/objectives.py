"""The losses of reward models and of preferences in one shape: from one number per answer to a loss per prompt.

Legend: n prompts with N answers in all, laid end to end, the best of each prompt first; `sizes` int64 [n] answers of
each. The number of an answer is a reward model's score, or the log-prob of the answer under the policy. Where a loss is
one of pairs and a prompt has several answers, its loss is the mean over all pairs of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_rl.config.tasks import DPOConfig, RewardStageConfig
from megatron_rl.losses.preferences import NEEDS, dpo_loss, ipo_loss, kto_loss, orpo_loss, simpo_loss
from megatron_rl.losses.rankings import all_pairs_loss, pairs_of, plackett_luce_loss, regression_loss
from megatron_rl.losses.row_sums import mean_rows
from megatron_rl.losses.terms import ItemTerms


@dataclass(frozen=True)
class Answers:
    """What a loss is told. numbers [N]: with their gradient. given [N]: of reward models the margin to the next answer
    or the score to give; of preferences the reference's log-probs. labels [N]: 1 for a desirable answer (kto).
    baseline: scalar, of kto (`kto_baseline`).
    """

    numbers: Tensor
    given: Tensor
    labels: Tensor
    sizes: Tensor
    baseline: Tensor


Objective = Callable[[Answers], ItemTerms]
"""Items are prompts; of kto and regression, where each has one answer, they are answers as well."""


def reward_objective(config: RewardStageConfig) -> Objective:
    """Of `megatron-rl reward`. Raises ValueError for another name."""
    match config.loss:
        case "all_pairs":
            return lambda of: all_pairs_loss(of.numbers, of.sizes, of.given if config.use_margins else None)
        case "plackett_luce":
            return lambda of: plackett_luce_loss(of.numbers, of.sizes)
        case "regression":
            return lambda of: regression_loss(of.numbers, of.given)
    raise ValueError(f"{config.loss} is no loss of reward models")


def preference_objective(config: DPOConfig) -> Objective:
    """Of `megatron-rl dpo`. Raises ValueError for another name."""
    beta = config.beta
    match config.loss:
        case "dpo":
            return _of_pairs(partial(dpo_loss, beta=beta, label_smoothing=config.label_smoothing))
        case "ipo":
            return _of_pairs(partial(ipo_loss, beta=beta))
        case "simpo":
            return _of_pairs(lambda better, worse, *_: simpo_loss(better, worse, beta, config.simpo_gamma))
        case "orpo":
            return _of_pairs(lambda better, worse, *_: orpo_loss(better, worse, beta))
        case "kto":
            weights = (config.desirable_weight, config.undesirable_weight)
            return lambda of: kto_loss(of.numbers, of.given, of.labels, of.baseline, beta, *weights)
    raise ValueError(f"{config.loss} is no loss of preferences")


def reads_means(config: DPOConfig) -> bool:
    """Whether the number of an answer is the mean of its tokens' log-probs, not their sum."""
    return NEEDS[config.loss].means


def _of_pairs(loss: Callable[[Tensor, Tensor, Tensor, Tensor], ItemTerms]) -> Objective:
    """loss: (log-probs of better and of worse answers, the reference's of both), each [P]."""

    def of_prompts(of: Answers) -> ItemTerms:
        better, worse, prompt = pairs_of(of.sizes)
        terms = loss(of.numbers[better], of.numbers[worse], of.given[better], of.given[worse])
        num_pairs = of.sizes.new_zeros(of.sizes.numel()).index_add(0, prompt, torch.ones_like(prompt))
        return ItemTerms(mean_rows(terms.loss, num_pairs), terms.metrics)

    return of_prompts
