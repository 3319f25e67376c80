"""Losses, estimators and rewards as they declare themselves at the function: names, needs, and the keys they read.

    @policy_loss("sapo", aggregation="seq-mean-token-mean", keys=("tau_pos", "tau_neg"))
    def sapo_loss(tokens, config): ...

A declaring module imports torch only for types or inside its functions, so that a plan reads declarations without it.
These modules are the plug-ins of a configuration: the first look into a table imports every module of its package by
name. A new loss is one new file there.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

from megatron_rl.columns import COLUMNS

Traits = TypeVar("Traits")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class EstimatorTraits:
    """Inputs of an advantage estimator next to `rewards` and `scores`.

    reads: columns of `columns.COLUMNS`, which a run with this estimator makes. One that reads `groups` compares the
    samples of a prompt, and has no baseline for a lone one. second: two samples per prompt or more.
    """

    reads: tuple[str, ...] = ()
    second: bool = False


@dataclass(frozen=True)
class PolicyLossTraits:
    """aggregation: the mode of `loss_agg_mode` that a loss is defined with, whatever the key says of KL and entropy;
    None: the key's. reads: columns whose values change its loss, next to which tokens count.
    """

    aggregation: str | None = None
    reads: tuple[str, ...] = ("old_log_probs", "advantages")


@dataclass(frozen=True)
class AnswerLossTraits:
    """A loss with one number per response: a log-prob of the policy, or a score of a reward model.

    means: the log-prob is the mean over the response's tokens, else their sum. reads: columns of responses next to
    their tokens; a loss of preferences that reads `given` gets the reference's log-probs there. alone: it learns from
    single responses, each with a label or a score, else it compares those to a prompt.
    """

    means: bool = False
    reads: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class DistillationTraits:
    """reads: the columns of a teacher that the loss compares the policy with, one kind of them: see
    `losses.distillation`."""

    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewardTraits:
    """data_sources: whose responses `compute_score` gives to this rule. package: the Python package that it imports, or
    None, and requirement: how pip names it."""

    data_sources: tuple[str, ...] = ()
    package: str | None = None
    requirement: str = ""


@dataclass(frozen=True)
class Declaration(Generic[Traits]):
    """One declared function. names: its own name, then its aliases. keys: settings that few others of its kind read."""

    names: tuple[str, ...]
    function: Callable[..., Any]
    traits: Traits
    keys: tuple[str, ...]

    @property
    def formula(self) -> str:
        """The first paragraph of the docstring, on one line."""
        return " ".join((self.function.__doc__ or "").split("\n\n")[0].split())

    @property
    def papers(self) -> tuple[str, ...]:
        """The arXiv numbers that the docstring cites, in their order."""
        return tuple(dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{5})", self.function.__doc__ or "")))


class Declarations(Mapping[str, Declaration[Traits]]):
    """Every declared function of one kind by name, aliases too. package: where its declaring modules are."""

    def __init__(self, package: str) -> None:
        self._package, self._is_complete = package, False
        self._by_name: dict[str, Declaration[Traits]] = {}

    def add(self, names: tuple[str, ...], traits: Traits, keys: tuple[str, ...]) -> Callable[[Function], Function]:
        """Return a decorator that declares a function. Raises ValueError for a name that another function has."""

        def declare(function: Function) -> Function:
            if taken := self._by_name.keys() & set(names):
                raise ValueError(f"{function.__qualname__}: {', '.join(sorted(taken))} is declared already")
            self._by_name |= dict.fromkeys(names, Declaration(names, function, traits, keys))
            return function

        return declare

    def _complete(self) -> dict[str, Declaration[Traits]]:
        if not self._is_complete:
            import_modules_of(self._package)
            # The order of names must not depend on what was imported first.
            entries = sorted(self._by_name.items(), key=lambda entry: entry[1].function.__module__)
            self._by_name, self._is_complete = dict(entries), True
        return self._by_name

    def __getitem__(self, name: str) -> Declaration[Traits]:
        return self._complete()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._complete())

    def __len__(self) -> int:
        return len(self._complete())

    def traits(self, name: str, otherwise: Traits) -> Traits:
        """The traits of a function; `otherwise` for a name that is not declared."""
        return self[name].traits if name in self else otherwise


def import_modules_of(package: str) -> list[ModuleType]:
    """Import every module directly in a package, in the order of their names, and return them."""
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return [importlib.import_module(f"{package}.{module.name}") for module in modules]


LOSSES, BUILT_IN_REWARDS = "megatron_rl.losses", "megatron_rl.scoring.built_in"

ESTIMATORS = Declarations[EstimatorTraits](LOSSES)
"""Choices of `algorithm.adv_estimator`; functions are `losses.estimators.Estimator`."""
POLICY_LOSSES = Declarations[PolicyLossTraits](LOSSES)
"""Choices of `actor_rollout_ref.actor.policy_loss.loss_mode`; functions are `losses.policy.PolicyLoss`."""
KL_ESTIMATES = Declarations[None](LOSSES)
"""Choices of `kl_loss_type` and `algorithm.kl_penalty`; functions are `losses.kl.KlEstimator`."""
PREFERENCE_LOSSES = Declarations[AnswerLossTraits](LOSSES)
"""Choices of `dpo.loss`; functions take (pairs or responses, DPOConfig) of `losses.terms`."""
REWARD_MODEL_LOSSES = Declarations[AnswerLossTraits](LOSSES)
"""Choices of `reward_training.loss`; functions take (responses, RewardTrainingConfig)."""
DISTILLATION_LOSSES = Declarations[DistillationTraits](LOSSES)
"""Choices of `distillation.distillation_loss.loss_mode`; functions are those of `losses.distillation`."""
REWARDS = Declarations[RewardTraits](BUILT_IN_REWARDS)
"""Choices of `custom_reward_function.name` where its `path` is null."""


READERS: dict[str, Declarations[Any]] = {
    "estimator": ESTIMATORS,
    "policy loss": POLICY_LOSSES,
    "preference loss": PREFERENCE_LOSSES,
    "reward model loss": REWARD_MODEL_LOSSES,
    "distillation loss": DISTILLATION_LOSSES,
}
"""Kinds of functions whose traits say which columns they read."""


def readers_of(column: str) -> list[str]:
    """The functions that declare that they read a column, by kind and first name."""
    return [
        f"{kind} {name}"
        for kind, functions in READERS.items()
        for name in sorted({entry.names[0] for entry in functions.values() if column in entry.traits.reads})
    ]


def declared_columns(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return these names of columns. Raises ValueError for one that is not declared, with the nearest."""
    return tuple(COLUMNS[name].name for name in names)


def estimator(
    *names: str, reads: tuple[str, ...] = (), second: bool = False, keys: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Declare an advantage estimator (see `EstimatorTraits`); keys are those of `algorithm`.

    Raises ValueError for a column that is not declared.
    """
    return ESTIMATORS.add(names, EstimatorTraits(declared_columns(reads), second), keys)


def policy_loss(
    *names: str,
    aggregation: str | None = None,
    reads: tuple[str, ...] = PolicyLossTraits.reads,
    keys: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """Declare a policy loss (see `PolicyLossTraits`); keys are those of `actor_rollout_ref.actor`. Raises as
    `estimator`.
    """
    return POLICY_LOSSES.add(names, PolicyLossTraits(aggregation, declared_columns(reads)), keys)


def preference_loss(
    *names: str, means: bool = False, reads: tuple[str, ...] = (), alone: bool = False, keys: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Declare a loss of preferences (see `AnswerLossTraits`); keys are those of `dpo`. Raises as `estimator`."""
    return PREFERENCE_LOSSES.add(names, AnswerLossTraits(means, declared_columns(reads), alone), keys)


def reward_model_loss(
    *names: str, reads: tuple[str, ...] = (), alone: bool = False, keys: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Declare a loss that trains reward models; keys are those of `reward_training`. Raises as `estimator`."""
    return REWARD_MODEL_LOSSES.add(names, AnswerLossTraits(reads=declared_columns(reads), alone=alone), keys)


def distillation_loss(
    *names: str, reads: tuple[str, ...], keys: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Declare a loss that compares policy and teacher; keys are those of `distillation.distillation_loss`. Raises as
    `estimator`.
    """
    return DISTILLATION_LOSSES.add(names, DistillationTraits(declared_columns(reads)), keys)


def reward(
    *names: str, data_sources: tuple[str, ...] = (), package: str | None = None, requirement: str = ""
) -> Callable[[Function], Function]:
    """Declare a built-in rule that scores responses (see `RewardTraits`)."""
    return REWARDS.add(names, RewardTraits(data_sources, package, requirement), ())
