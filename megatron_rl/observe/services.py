"""Services that receive metrics, whose packages the user installs: Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.observe.prometheus import PrometheusExporter


class Wandb:
    """A run of Weights & Biases; wandb's own settings say where it goes, and whether it is online."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], folder: Path) -> None:
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(project=project, name=name, config=settings, dir=str(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send answers of a validation as a table; columns as in a table of samples."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = self._wandb.Table(columns=columns, data=[[row.get(name) for name in columns] for row in rows])
        self._run.log({"val/generations": table}, step=step)

    def close(self) -> None:
        """Finish the run, which sends what is left."""
        self._run.finish()


class Mlflow:
    """A run of MLflow; MLflow's own settings say where it is tracked."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], folder: Path) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(project)
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_dict(settings, "config.json")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step; MLflow's names have no "@"."""
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send answers of a validation as a JSON file."""
        self._mlflow.log_dict({"rows": [dict(row) for row in rows]}, f"val_generations/{step}.json")

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


KINDS: dict[str, type[Wandb] | type[Mlflow]] = {"wandb": Wandb, "mlflow": Mlflow}
"""Name in `trainer.logger`, which is the package's too -> class."""


def absent_services(loggers: Sequence[str]) -> list[str]:
    """The services of `trainer.logger` whose package is not installed."""
    return [name for name in KINDS if name in loggers and importlib.util.find_spec(name) is None]


class Services:
    """The services that a run logs to. One that raises is dropped with a warning, and the run goes on."""

    def __init__(
        self, services: Mapping[str, Wandb | Mlflow | PrometheusExporter], exporter: PrometheusExporter | None = None
    ) -> None:
        self._open = dict(services) | ({} if exporter is None else {"prometheus": exporter})
        self.exporter = exporter

    @classmethod
    def start(
        cls,
        loggers: Sequence[str],
        project: str,
        name: str,
        settings: dict[str, Any],
        folder: Path,
        port: int | None = None,
    ) -> Services:
        """Start the services of `trainer.logger`, and an exporter where it has a port.

        Raises ModuleNotFoundError where a package is absent, ConfigError where the exporter cannot listen.
        """
        exporter = None
        if port is not None:
            from megatron_rl.observe.prometheus import PrometheusExporter  # a server, only needed here

            exporter = PrometheusExporter(port)
        return cls({kind: KINDS[kind](project, name, settings, folder) for kind in loggers if kind in KINDS}, exporter)

    def log(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Send the metrics of one step. Returns a warning for each service that failed."""
        return self._each("log", metrics, step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> list[str]:
        """Send answers of a validation. Returns a warning for each service that failed."""
        return self._each("log_samples", rows, step)

    def close(self) -> list[str]:
        """End all runs. Returns a warning for each service that failed."""
        return self._each("close")

    def _each(self, method: str, *arguments: Any) -> list[str]:
        warnings = []
        for name, service in list(self._open.items()):
            try:
                getattr(service, method)(*arguments)
            except Exception as error:  # any library's: a network that is away is no reason to stop training
                del self._open[name]
                warnings.append(f"{name} gets no more of this run: {type(error).__name__}: {error}")
        return warnings
