"""A feature: the keys that turn it on, and its partners. `feature_rows` has the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_rl.config.keys import value_of
from megatron_rl.config.roles import RoleSpec, roles_of, rollout_pool
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.folder_checks import ModelSizes

Settings = dict[str, Any]
"""Dotted key -> value."""
CPU, CUDA = "cpu", "cuda"
OPTIM = "optim"
ROLE = "<ROLE>"
"""Stands in a key for the group of a role: of the actor, critic, reference, a reward model or a teacher."""
POLICY = "actor_rollout_ref.actor"
"""The group of the actor."""


class RunFacts:
    """The facts that rows of features read: a configuration, its roles, and the models that could be read."""

    def __init__(self, config: RunConfig, models: Sequence[ModelSizes] = ()) -> None:
        self.config = config
        self._models = {model.path: model for model in models}

    @cached_property
    def roles(self) -> tuple[RoleSpec, ...]:
        """Every role, in the order of building."""
        return tuple(roles_of(self.config))

    @cached_property
    def megatron_roles(self) -> tuple[RoleSpec, ...]:
        """Every role on Megatron's grid."""
        return tuple(role for role in self.roles if not role.kind.generates)

    @cached_property
    def trained_roles(self) -> tuple[RoleSpec, ...]:
        """Every role that has an optimizer."""
        return tuple(role for role in self.roles if role.is_trained)

    @cached_property
    def rollout_pool(self) -> str:
        """The pool that generates."""
        return rollout_pool(self.config)

    @property
    def device(self) -> str:
        """`trainer.device`."""
        return self.config.trainer.device

    @property
    def on_cpu(self) -> bool:
        """Whether the run is on CPUs."""
        return self.device == CPU

    def model_of(self, role: RoleSpec) -> ModelSizes | None:
        """Return the model of a role; None if it could not be read."""
        return self._models.get(role.model_path)

    @cached_property
    def policy(self) -> RoleSpec:
        """The role that starts from the actor's model: the actor, or what a task trains."""
        return self.roles[0]

    def value(self, key: str) -> Any:
        """Return the value of a dotted key."""
        return value_of(self.config, key)


@dataclass(frozen=True)
class Use:
    """A feature that is on. settings: what turns it on. off: the change that turns it off; {}: no such change.

    role: the role that it belongs to; None: the run. A pair of features of two different roles is none.
    """

    settings: Settings
    off: Settings
    role: RoleSpec | None = None


Change = Settings | Callable[[RunFacts], Settings]
"""A way out that is the same for every run, or follows from it."""


@dataclass(frozen=True)
class Relation:
    """A feature that another one needs, or does not go with. other: its name. why: the reason, for a user.

    change: the way out, where another is better than to turn the row's own feature off, or for a need the other one on.
    gives_up: for a need: whether the way out is to turn the row's own feature off. hint: a further way out. when:
    whether the reason holds in a run.
    """

    other: str
    why: str
    change: Change | None = None
    hint: str = ""
    gives_up: bool = False
    when: Callable[[RunFacts], bool] | None = None


@dataclass(frozen=True)
class Requirement:
    """A requirement of a feature on the model or the layout. text: what must hold, for lists.

    broken: the reason why it does not, for one use; "" where it holds. change: as in `Relation`; it may read the use.
    keys: further settings in the message; None: the model folder of the use's role.
    """

    text: str
    broken: Callable[[RunFacts, Use], str]
    change: Settings | Callable[[RunFacts, Use], Settings] | None = None
    hint: str = ""
    keys: Callable[[RunFacts, Use], Settings] | None = None


@dataclass(frozen=True)
class Feature:
    """A row of the table. name: in JSON and in tests. text: what people call it. turned_on: an example that turns it
    on; in a key <ROLE> stands for the group of a role.

    on: its uses in a run. needs, excludes: other features, each pair in one row alone, that of the later feature.
    of_model, of_layout: conditions. proven: devices on which a run has shown it. refused_unproven: whether it is
    refused elsewhere until `trainer.allow_unproven`. in_tasks: whether sft, reward and dpo read its keys, too.
    """

    name: str
    text: str
    turned_on: Settings
    on: Callable[[RunFacts], Iterable[Use]]
    needs: tuple[Relation, ...] = ()
    excludes: tuple[Relation, ...] = ()
    of_model: tuple[Requirement, ...] = ()
    of_layout: tuple[Requirement, ...] = ()
    proven: tuple[str, ...] = (CPU,)
    refused_unproven: bool = False
    in_tasks: bool = False

    def turned_on_for(self, role: RoleSpec | None = None) -> Settings:
        """Return `turned_on` with the group of a role; None: of the actor."""
        group = POLICY if role is None else role.key
        return {key.replace(ROLE, group): value for key, value in self.turned_on.items()}

    def is_refused_on(self, device: str) -> bool:
        """Whether the feature waits on this device for `trainer.allow_unproven`."""
        return self.refused_unproven and device not in self.proven


On = Callable[[RunFacts], Iterator[Use]]


def where(key: str, off: Any = False, is_on: Callable[[Any], bool] = bool) -> On:
    """Return `on` of a feature with one key of the run. off: the value that turns it off."""

    def on(run: RunFacts) -> Iterator[Use]:
        value = run.value(key)
        if is_on(value):
            yield Use({key: value}, {key: off})

    return on


def equals(*values: Any) -> Callable[[Any], bool]:
    """Return whether a value is one of these."""
    return lambda value: value in values


def of_roles(name: str, off: Any = False, is_on: Callable[[Any], bool] = bool, trained: bool = False) -> On:
    """Return `on` of a feature with one key below <ROLE>. trained: of roles that are trained alone."""
    group, _, leaf = name.rpartition(".")

    def on(run: RunFacts) -> Iterator[Use]:
        for role in run.trained_roles if trained else run.megatron_roles:
            head, *parts = group.split(".")
            # An optimizer is of what a role is trained with.
            settings: Any = getattr(role.settings if head == OPTIM else role, head)
            for part in parts:
                settings = getattr(settings, part)
            value = getattr(settings, leaf)
            if is_on(value):
                key = f"{role.key}.{name}"
                yield Use({key: value}, {key: off}, role)

    return on


def joined(parts: Iterable[Mapping[str, Any]]) -> Settings:
    """Return several settings as one."""
    return {key: value for part in parts for key, value in part.items()}
