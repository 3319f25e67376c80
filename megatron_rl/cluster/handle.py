"""Handles: objects with the methods of a role, which call the role on the ranks of a pool."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.dispatch import Future, RemoteMethod, methods_of

HOST = ""
"""The role of the host's own methods."""


@dataclass(frozen=True)
class Target:
    """One method of one role. phase: the name under which its time is reported."""

    role: str
    method: str
    mark: RemoteMethod
    phase: str

    @property
    def who(self) -> str:
        """The role's name in messages."""
        return self.role or "host"


Submit = Callable[[Target, tuple[Any, ...], dict[str, Any]], Future[Any]]


def targets_of(role: str, kind: type, phases: dict[str, str]) -> dict[str, Target]:
    """Return name -> target of every method of a role's class; phases: of "score" and "update"."""
    return {
        name: Target(role, name, mark, phases.get(mark.phase, mark.phase)) for name, mark in methods_of(kind).items()
    }


def all_targets(
    host_class: type, kinds: Mapping[str, type], phases: Mapping[str, dict[str, str]]
) -> dict[str, dict[str, Target]]:
    """Return role -> `targets_of` its class, with the host's own under HOST. kinds: role -> class; phases: by role."""
    return {role: targets_of(role, kind, phases.get(role, {})) for role, kind in {HOST: host_class, **kinds}.items()}


class Handle:
    """Has the methods of a role; each calls the ranks and returns a `Future`. Type checkers take it for the role."""

    def __init__(self, kind: type, targets: dict[str, Target], submit: Submit) -> None:
        self._kind, self._methods = kind, sorted(targets)
        for name, target in targets.items():
            setattr(self, name, types.MethodType(_bound(inspect.getattr_static(kind, name), target, submit), self))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"no method {name!r} in {self._kind.__name__}; its methods are: {', '.join(self._methods)}"
        )


def _bound(method: Callable[..., Any], target: Target, submit: Submit) -> Callable[..., Future[Any]]:
    """Return a method with the name and docstring of the role's method that calls the ranks."""

    @functools.wraps(method)
    def call(handle: Handle, *args: Any, **kwargs: Any) -> Future[Any]:
        return submit(target, args, kwargs)

    return call
