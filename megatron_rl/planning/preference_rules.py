"""Rules of the losses of `megatron-rl dpo`: which go together, and which of their keys fit them."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from megatron_rl.config.declarations import PREFERENCE_LOSSES, AnswerLossTraits
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import DPO
from megatron_rl.errors import Violation

LOSS, WEIGHTS, NOISE = "dpo.loss", "dpo.loss_weights", "dpo.label_smoothing"
DIVERGENCE = "f_divergence_type"


def preference_problems(config: RunConfig) -> Iterable[Violation]:
    """Every violation of a configuration of `dpo`; none for another task's. Names are checked elsewhere."""
    keys = config.dpo
    if config.trainer.stage != DPO:
        return
    names = list(dict.fromkeys(keys.loss))
    if not names or len(names) < len(keys.loss):
        yield Violation({LOSS: keys.loss}, "must name at least one loss, and each once", {LOSS: names or ["dpo"]})
    alone = [name for name in names if PREFERENCE_LOSSES.traits(name, AnswerLossTraits()).alone]
    if alone and len(names) > len(alone):
        rule = f"cannot be combined on one file: {', '.join(alone)} reads single responses, the others compare them"
        yield Violation({LOSS: keys.loss}, rule, {LOSS: [name for name in names if name not in alone]})
    elif keys.loss_weights is not None:
        yield from _weight_problems(len(keys.loss), keys.loss_weights)
    if "robust" in names and keys.label_smoothing == 0.5:
        rule = "must be < 0.5 with robust: with half of the labels swapped nothing can be learned"
        yield Violation({NOISE: 0.5}, rule, {NOISE: 0.4})
    readers = [name for name, declared in PREFERENCE_LOSSES.items() if DIVERGENCE in declared.keys]
    if keys.f_divergence_type != "reverse_kl" and not set(readers) & set(names):
        rule = f"must be reverse_kl with {LOSS}={', '.join(names)}: other divergences are for {', '.join(readers)}"
        yield Violation({f"dpo.{DIVERGENCE}": keys.f_divergence_type}, rule, {f"dpo.{DIVERGENCE}": "reverse_kl"})


def _weight_problems(count: int, weights: list[float]) -> Iterable[Violation]:
    if len(weights) != count:
        rule = f"must be one number for each of {LOSS}, of which there are {count}"
        yield Violation({WEIGHTS: weights}, rule, {WEIGHTS: None})
    elif any(isfinite(weight) and weight <= 0 for weight in weights):
        rule = "must be > 0: a loss without weight is left out"
        yield Violation({WEIGHTS: weights}, rule, {WEIGHTS: None})
