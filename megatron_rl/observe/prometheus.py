"""The metrics of the last step for Prometheus, at http://127.0.0.1:PORT/metrics of the driver's machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app, start_http_server

from megatron_rl.errors import ConfigError

LOOPBACK = "127.0.0.1"
REQUEST_S = 10.0
"""Seconds in which a peer must send its request: each one that is connected has a thread."""
PHASES = {
    "timing_s/": ("phase_seconds", "Seconds of a phase in the last step that had it"),
    "timing_planned_s/": ("phase_planned_seconds", "Planned seconds of a phase"),
    "perf/memory_gb/": ("phase_memory_gigabytes", "Memory of the fullest rank in a phase"),
}
"""Beginning of a metric's name -> gauge with the label `phase`, and its help. All others are `megatron_rl_metric`."""


class PrometheusExporter:
    """Serves what `log` was given last. A service of a run, as a tracker is.

    port: that it listens on, 0 takes a free one. Raises ConfigError where it cannot listen.
    """

    def __init__(self, port: int) -> None:
        registry = CollectorRegistry()
        self._step = Gauge("megatron_rl_step", "The last step", registry=registry)
        self._other = Gauge("megatron_rl_metric", "A metric of the last step that had it", ["name"], registry=registry)
        self._gauges = {
            prefix: Gauge(f"megatron_rl_{name}", text, ["phase"], registry=registry)
            for prefix, (name, text) in PHASES.items()
        }
        self._seconds = Counter("megatron_rl_exporter_seconds", "CPU seconds of this exporter's own", registry=registry)
        try:
            self._server, self._thread = start_http_server(port, addr=LOOPBACK, registry=registry)
        except OSError as error:
            rule = f"must be a free port on {LOOPBACK}: {error.strerror}"
            raise ConfigError(f"trainer.prometheus.port={port} {rule}; try: trainer.prometheus.port=0") from error
        self._answer: Callable[[Any, Any], list[bytes]] = make_wsgi_app(registry)
        self._server.set_app(self._scraped)
        handler = cast(type, self._server.RequestHandlerClass)
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": REQUEST_S})
        self.port: int = self._server.server_port

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of one step; one that a later step does not have keeps its value."""
        with self._counted():
            self._step.set(step)
            for name, value in metrics.items():
                prefix = next((prefix for prefix in PHASES if name.startswith(prefix)), None)
                if prefix is None:
                    self._other.labels(name).set(value)
                else:
                    self._gauges[prefix].labels(name.removeprefix(prefix)).set(value)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Samples are no numbers: nothing is done."""

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _scraped(self, environ: Any, start_response: Any) -> list[bytes]:
        """Answer a request, in a thread of its own."""
        with self._counted():
            return self._answer(environ, start_response)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            self._seconds.inc(time.thread_time() - started)
