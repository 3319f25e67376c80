"""What a row of the table is made of: a scenario, an observation of it, and when it runs.

A scenario is a model, the layout that cuts it, and keys. An observation runs it and compares its numbers with one
process, or with transformers. Runs of one process are made once in a session for each model and its own keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
from sweeps import WEEKLY
from updates import run_layout

ALWAYS: tuple[pytest.MarkDecorator, ...] = ()
"""In `make test`."""
LONG = (pytest.mark.exhaustive,)
"""In the long tests; `WEEKLY` is left out of these, too."""
WHEN = (ALWAYS, LONG, WEEKLY)
SaveModel = Callable[..., str]
ALONE = (1, 1, 1)
T = TypeVar("T")


@dataclass(frozen=True)
class Scenario:
    """A model in one layout."""

    model: SaveModel
    """Writes the model's folder and returns its path."""
    layout: str
    """How a reader names the layout."""
    ranks: tuple[int, int, int] = ALONE
    """Ranks, tp, pp."""
    sizes: Mapping[str, object] = field(default_factory=dict)
    """Further keys of the actor's group `megatron`; `micro_batch`: rows of a pass."""
    keys: Mapping[str, object] = field(default_factory=dict)
    """Keys of any group, with `__` for dots."""
    common: Mapping[str, object] = field(default_factory=dict)
    """Keys of any group that the run in one process has, too."""
    changes: Mapping[str, object] = field(default_factory=dict)
    """Of the model's settings."""

    @property
    def model_name(self) -> str:
        """For an id: the function's name without `save_`, and what is changed."""
        changed = "".join(f" {key}={value}" for key, value in self.changes.items())
        return self.model.__name__.removeprefix("save_") + changed


class Runs:
    """Folders of models, and what one process gives, kept for all rows of a session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[str, str] = {}
        self._once: dict[tuple, Any] = {}

    def path(self, scenario: Scenario) -> str:
        """Return the folder of the scenario's model. No row may change it."""
        name = scenario.model_name
        if name not in self._paths:
            self._paths[name] = scenario.model(self._folder / name, **scenario.changes)
        return self._paths[name]

    def updated(self, scenario: Scenario) -> list[dict]:
        """Run `updates.one_update` on every rank of the scenario."""
        keys = {**scenario.common, **scenario.keys}
        return run_layout(self.path(scenario), *scenario.ranks, keys=keys, **scenario.sizes)

    def alone(self, scenario: Scenario) -> list[dict]:
        """Return the same of one process with the common keys."""
        which = (scenario.model_name, *sorted(scenario.common.items()))
        return self.once(which, lambda: run_layout(self.path(scenario), *ALONE, keys=scenario.common))

    def once(self, which: tuple, run: Callable[[], T]) -> T:
        """Return what `run` gives, and gave before under the same name."""
        if which not in self._once:
            self._once[which] = run()
        return self._once[which]


class Observation(Protocol):
    """What a row looks at."""

    name: str

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        """Run the scenario and compare. folder: empty, this row's own."""
        ...


@dataclass(frozen=True)
class Row:
    """One test: its id names the model, the layout and the observation."""

    scenario: Scenario
    observation: Observation
    when: tuple[pytest.MarkDecorator, ...] = LONG

    @property
    def parameter(self):
        """For `pytest.mark.parametrize`."""
        name = f"{self.scenario.model_name}, {self.scenario.layout}: {self.observation.name}"
        return pytest.param(self.scenario, self.observation, id=name, marks=list(self.when))
