"""The services that receive a run's metrics next to its own files: trackers and the exporter for Prometheus."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.observe.trackers import TRACKERS, Tracker

if TYPE_CHECKING:
    from megatron_rl.observe.prometheus import PrometheusExporter

OTLP = "opentelemetry.exporter.otlp.proto.http"
MODULES, PACKAGES = {"opentelemetry": OTLP}, {"opentelemetry": OTLP.replace(".", "-")}
"""Name in `trainer.logger` -> the module that it needs, and the package that has it, where these have other names."""


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

    def __init__(self, services: Mapping[str, Tracker], exporter: PrometheusExporter | None = None) -> None:
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
