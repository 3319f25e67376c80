"""Trackers, whose packages the user installs: one class for each name that `trainer.logger` may have.

A tracker's own settings say where a run goes, and whether it is online. Its package is imported when it is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.observe.step_spans import StepSpans


class Tracker(Protocol):
    """What receives a run. Any method may raise what its package raises."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of one step."""

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Take responses of a validation."""

    def close(self) -> None:
        """End the run, which sends what is left."""


def as_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return (names of all columns, cells of each row). A cell is None if its row does not have the column."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


class Wandb:
    """A run of Weights & Biases; wandb's own settings say where it goes, and whether it is online."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], folder: Path) -> None:
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(project=project, name=name, config=settings, dir=str(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send responses of a validation as a table; columns as in a table of samples."""
        columns, cells = as_table(rows)
        table = self._wandb.Table(columns=columns, data=cells)
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
        """Send responses of a validation as a JSON file."""
        self._mlflow.log_dict({"rows": [dict(row) for row in rows]}, f"val_generations/{step}.json")

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class Trackio:
    """A run of trackio, which keeps it on this machine unless its settings name a server."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], folder: Path) -> None:
        self._trackio = importlib.import_module("trackio")
        self._run = self._trackio.init(project=project, name=name, config=settings, embed=False)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send responses of a validation as text, one block for each: trackio's tables need pandas."""
        blocks = ["\n".join(f"- {name}: `{value}`" for name, value in row.items()) for row in rows]
        self._run.log({"val/generations": self._trackio.Markdown("\n\n---\n\n".join(blocks))}, step=step)

    def close(self) -> None:
        """Finish the run, which sends what is left."""
        self._run.finish()


class Swanlab:
    """A run of SwanLab."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], folder: Path) -> None:
        self._swanlab = importlib.import_module("swanlab")
        self._run = self._swanlab.init(project=project, name=name, config=settings, log_dir=str(folder / "swanlog"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send responses of a validation, one text for each."""
        lines = [" | ".join(f"{name}: {value}" for name, value in row.items()) for row in rows]
        self._run.log({"val/generations": [self._swanlab.Text(line) for line in lines]}, step=step)

    def close(self) -> None:
        """Finish the run, which sends what is left."""
        self._run.finish()


class Clearml:
    """A task of ClearML. It connects nothing of the process by itself."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], folder: Path) -> None:
        self._task = importlib.import_module("clearml").Task.init(
            project_name=project,
            task_name=name,
            reuse_last_task_id=False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_connect_streams=False,
        )
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
        self._task.get_logger().report_table("val/generations", "answers", iteration=step, table_plot=table)

    def close(self) -> None:
        """End the task, which sends what is left."""
        self._task.close()


TRACKERS: dict[str, Callable[[str, str, dict[str, Any], Path], Tracker]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
    "swanlab": Swanlab,
    "clearml": Clearml,
    "opentelemetry": StepSpans,
}
"""Name in `trainer.logger` -> what makes a tracker of its four arguments."""
