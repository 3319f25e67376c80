"""Metrics for services whose packages the user installs: Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

SERVICES = ("wandb", "mlflow")
"""Names of `trainer.logger`, and of the packages."""


def absent_services(loggers: Sequence[str]) -> list[str]:
    """Those of `trainer.logger` whose package is not installed."""
    return [name for name in SERVICES if name in loggers and importlib.util.find_spec(name) is None]


class Service(Protocol):
    """Where metrics and samples go."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The metrics of one step."""

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Some answers of a validation, columns as in a sample table."""

    def close(self) -> None:
        """The run has ended."""


class Wandb:
    """A run of Weights & Biases; where and whether it is online is for wandb's own settings to say."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], folder: Path) -> None:
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(project=project, name=name, config=settings, dir=str(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """A table."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = self._wandb.Table(columns=columns, data=[[row.get(name) for name in columns] for row in rows])
        self._run.log({"val/generations": table}, step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class Mlflow:
    """A run of MLflow; where it is tracked is for MLflow's own settings to say."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], folder: Path) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(project)
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_dict(settings, "config.json")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The metrics of one step; MLflow's names have no "@"."""
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """A JSON file."""
        self._mlflow.log_dict({"rows": [dict(row) for row in rows]}, f"val_generations/{step}.json")

    def close(self) -> None:
        """End it."""
        self._mlflow.end_run()


KINDS: dict[str, type[Wandb] | type[Mlflow]] = {"wandb": Wandb, "mlflow": Mlflow}


class Services:
    """Those that a run logs to. What one of them raises costs that one, said once, and not the run."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self._open = dict(services)

    @classmethod
    def start(cls, loggers: Sequence[str], project: str, name: str, settings: dict[str, Any], folder: Path) -> Services:
        """Those of `trainer.logger`. Raises ModuleNotFoundError where a package is absent."""
        return cls({one: KINDS[one](project, name, settings, folder) for one in loggers if one in KINDS})

    def log(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Returns what went wrong, as sentences."""
        return self._each("log", metrics, step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> list[str]:
        """The same of answers."""
        return self._each("log_samples", rows, step)

    def close(self) -> list[str]:
        """The same of the end."""
        return self._each("close")

    def _each(self, method: str, *arguments: Any) -> list[str]:
        said = []
        for name, service in list(self._open.items()):
            try:
                getattr(service, method)(*arguments)
            except Exception as error:  # any library's: a network that is away is no reason to stop training
                del self._open[name]
                said.append(f"{name} gets no more of this run: {type(error).__name__}: {error}")
        return said
