"""Losses that a client of the service asks for by name: sums over tokens, which several passes may add up.

Legend: N tokens of a micro-batch, each with its own log-prob p, given log-prob q and given weight or advantage A.
Names of the Tinker API have its formulas; every other policy loss of this package keeps its own name, summed over
the tokens that count. Those that look at all tokens of a micro-batch depend on how a pass is cut, as in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron_rl.config.declarations import POLICY_LOSSES, Declaration, PolicyLossTraits
from megatron_rl.config.schema import ActorConfig
from megatron_rl.losses.policy import PolicyTokens, limited_exp
from megatron_rl.losses.rows import mean_counted, spread

if TYPE_CHECKING:
    from torch import Tensor

Settings = Mapping[str, float]
WEIGHTED, SAMPLED = ("weights",), ("logprobs", "advantages")
COUNTED = "sequence_ratio_mask"
"""The name, in a datum, of the numbers that are not 0 where a token counts."""
ANOTHER_KEYS = "bypass_mode"
"""A name whose loss another key of the configuration decides."""


@dataclass(frozen=True)
class SummedLoss:
    """A loss by name.

    function: (tokens, settings) -> what each token adds [N]. reads: names of what each datum has for every token; the
    last one is A. defaults: those settings. keys: a setting's name -> its key of the configuration, which has bounds.
    """

    function: Callable[[PolicyTokens, Settings], Tensor]
    reads: tuple[str, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


def cross_entropy(tokens: PolicyTokens, _settings: Settings) -> Tensor:
    """-A p; A is any real number, so that this is the gate to every loss of log-probs."""
    return -tokens.advantages * tokens.log_probs


def importance_sampling(tokens: PolicyTokens, _settings: Settings) -> Tensor:
    """-A e^(p - q)."""
    return -tokens.advantages * tokens.ratio


def ppo(tokens: PolicyTokens, settings: Settings) -> Tensor:
    """-min(A r, A r'), where r' is r = e^(p - q) within its two thresholds."""
    return _clipped(tokens.ratio, tokens.advantages, settings)


def _clipped(ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    limited = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -(advantages * ratio).minimum(advantages * limited)


def cispo(tokens: PolicyTokens, settings: Settings) -> Tensor:
    """-A r' p, where r' is r = e^(p - q) within its two thresholds, without a gradient."""
    limited = tokens.ratio.detach().clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -tokens.advantages * limited * tokens.log_probs


def dro(tokens: PolicyTokens, settings: Settings) -> Tensor:
    """-A p + beta / 2 (p - q)^2."""
    return -tokens.advantages * tokens.log_probs + 0.5 * settings["beta"] * tokens.log_ratio.square()


def gspo(tokens: PolicyTokens, settings: Settings) -> Tensor:
    """As ppo, where r is e^(mean of p - q over the row's tokens that count), with the gradient of the token's own p."""
    counts, lengths, own = tokens.counts, tokens.lengths, tokens.log_probs
    whole = spread(mean_counted(tokens.log_ratio.detach(), counts, lengths), lengths, len(counts))
    return _clipped(limited_exp(whole + own - own.detach()), tokens.advantages, settings)


def _thresholds(low: float, high: float) -> Mapping[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


OF_THE_API = {
    "cross_entropy": SummedLoss(cross_entropy, WEIGHTED),
    "importance_sampling": SummedLoss(importance_sampling, SAMPLED),
    "ppo": SummedLoss(ppo, SAMPLED, _thresholds(0.8, 1.2)),
    "cispo": SummedLoss(cispo, SAMPLED, _thresholds(0.0, 4.0)),
    "dro": SummedLoss(dro, SAMPLED, {"beta": 0.05}),
    "gspo": SummedLoss(gspo, (COUNTED, *SAMPLED), _thresholds(0.8, 1.2)),
}


def summed_losses(actor: ActorConfig) -> Mapping[str, SummedLoss]:
    """Every loss by its name. actor: has the defaults of settings that are its keys."""
    names = [name for name in POLICY_LOSSES if name != ANOTHER_KEYS]
    return {**{name: _declared(POLICY_LOSSES[name], actor) for name in names}, **OF_THE_API}


def _declared(loss: Declaration[PolicyLossTraits], actor: ActorConfig) -> SummedLoss:
    keys = {key.rpartition(".")[2]: f"actor_rollout_ref.actor.{key}" for key in loss.keys}

    def function(tokens: PolicyTokens, settings: Settings) -> Tensor:
        terms: Tensor = loss.function(tokens, _with_settings(actor, settings)).loss
        return terms * tokens.counts

    return SummedLoss(function, (COUNTED, *SAMPLED), {name: _value(actor, name) for name in keys}, keys)


def _value(actor: ActorConfig, name: str) -> Any:
    return getattr(actor if hasattr(actor, name) else actor.policy_loss, name)


def _with_settings(actor: ActorConfig, settings: Settings) -> ActorConfig:
    of_actor = {name: value for name, value in settings.items() if hasattr(actor, name)}
    below = {name: value for name, value in settings.items() if name not in of_actor}
    return replace(actor, **of_actor, policy_loss=replace(actor.policy_loss, **below))  # type: ignore[arg-type]  # by name
