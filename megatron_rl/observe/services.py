"""Services that receive a run's metrics next to its own files: trackers, and the exporter for Prometheus.

The user installs a tracker's package; it is imported when the tracker is made. A tracker's own settings say where a run
goes, and whether it is online.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.observe.step_spans import StepSpans

if TYPE_CHECKING:
    from megatron_rl.observe.prometheus import PrometheusExporter

OTLP = "opentelemetry.exporter.otlp.proto.http"
MODULES, PACKAGES = {"opentelemetry": OTLP}, {"opentelemetry": OTLP.replace(".", "-")}
"""Name in `trainer.logger` -> the module that it needs, and the package that has it, where these have other names."""
SAMPLES = "val/generations"
"""Name of a validation's responses."""


class Service(Protocol):
    """A receiver of a run. Any method may raise the errors of its package."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of one step."""

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Take responses of a validation."""

    def close(self) -> None:
        """End the run, which sends what is left."""


class PackageRun:
    """A run of a package whose `init` returns an object with `log` and `finish`, as wandb's does.

    options: further arguments of `init`, by the run's folder. shown: returns the value that responses are sent as.
    """

    def __init__(
        self,
        package: str,
        options: Callable[[Path], dict[str, Any]],
        shown: Callable[[Any, Sequence[Mapping[str, Any]]], Any],
        project: str,
        name: str,
        settings: dict[str, Any],
        folder: Path,
    ) -> None:
        self._package, self._shown = importlib.import_module(package), shown
        self._run = self._package.init(project=project, name=name, config=settings, **options(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._run.log({SAMPLES: self._shown(self._package, rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


def as_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return (names of all columns, cells of each row). A cell is None if its row does not have the column."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


def wandb_table(wandb: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a table; columns as in a table of samples."""
    columns, cells = as_table(rows)
    return wandb.Table(columns=columns, data=cells)


def trackio_text(trackio: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return text, one block for each response: trackio's tables need pandas."""
    blocks = ["\n".join(f"- {name}: `{value}`" for name, value in row.items()) for row in rows]
    return trackio.Markdown("\n\n---\n\n".join(blocks))


def swanlab_texts(swanlab: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a text for each response."""
    return [swanlab.Text(" | ".join(f"{name}: {value}" for name, value in row.items())) for row in rows]


class Mlflow:
    """A run of MLflow."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], folder: Path) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(project)
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_dict(settings, "config.json")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step; MLflow's names have no "@"."""
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send responses of a validation as a JSON file."""
        self._mlflow.log_dict({"rows": [dict(row) for row in rows]}, f"val_generations/{step}.json")

    def close(self) -> None:
        self._mlflow.end_run()


class Clearml:
    """A task of ClearML. It connects nothing of the process by itself."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], folder: Path) -> None:
        connected = {"auto_connect_arg_parser": False, "auto_connect_frameworks": False, "auto_connect_streams": False}
        package = importlib.import_module("clearml")
        self._task = package.Task.init(project_name=project, task_name=name, reuse_last_task_id=False, **connected)
        self._task.connect_configuration(settings, name="config")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step: a plot for what is before the first slash of a name, a line for the rest."""
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            self._task.get_logger().report_scalar(title, series or title, value, iteration=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send responses of a validation as a table."""
        columns, cells = as_table(rows)
        table = [columns, *([str(cell) for cell in line] for line in cells)]
        self._task.get_logger().report_table(SAMPLES, "answers", iteration=step, table_plot=table)

    def close(self) -> None:
        self._task.close()


TRACKERS: dict[str, Callable[[str, str, dict[str, Any], Path], Service]] = {
    "wandb": partial(PackageRun, "wandb", lambda folder: {"dir": str(folder)}, wandb_table),
    "mlflow": Mlflow,
    "trackio": partial(PackageRun, "trackio", lambda folder: {"embed": False}, trackio_text),
    "swanlab": partial(PackageRun, "swanlab", lambda folder: {"log_dir": str(folder / "swanlog")}, swanlab_texts),
    "clearml": Clearml,
    "opentelemetry": StepSpans,
}
"""Name in `trainer.logger` -> what makes a tracker of project, name, settings and the run's folder."""


def absent_services(loggers: Sequence[str]) -> list[str]:
    """The services of `trainer.logger` whose package is not installed."""
    return [name for name in TRACKERS if name in loggers and not is_installed(MODULES.get(name, name))]


def is_installed(module: str) -> bool:
    """Whether there is a module, whose parents may be missing, too."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class Services:
    """The services that a run logs to. One that raises is dropped with a warning, and the run continues."""

    def __init__(self, services: Mapping[str, Service], exporter: PrometheusExporter | None = None) -> None:
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
        return cls(
            {kind: TRACKERS[kind](project, name, settings, folder) for kind in loggers if kind in TRACKERS}, exporter
        )

    def log(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Send the metrics of one step. Returns a warning for each service that failed."""
        return self._each("log", metrics, step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> list[str]:
        """Send responses of a validation. Returns a warning for each service that failed."""
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
