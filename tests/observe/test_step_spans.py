"""Spans of steps, as a collector receives them by OTLP over HTTP. Skipped by name where OpenTelemetry is not installed.

It is no requirement of the project. These ran with opentelemetry-exporter-otlp-proto-http 1.45.2:

    pip install opentelemetry-exporter-otlp-proto-http && python -m pytest tests/observe/test_step_spans.py
"""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from megatron_rl.observe.phase_clock import TIMELINE_FILE, PhaseRun, write_calls
from megatron_rl.observe.services import Services, is_installed

pytestmark = pytest.mark.skipif(
    not is_installed("opentelemetry.exporter.otlp.proto.http"),
    reason="opentelemetry-exporter-otlp-proto-http is not installed",
)
CALLS = {
    1: [PhaseRun("driver", "adv", 100.5, 100.75), PhaseRun("global_pool", "update_actor", 101.0, 103.0)],
    2: [PhaseRun("rollout_pool/0", "slice", 102.5, 104.5)],
    3: [PhaseRun("driver", "adv", 105.0, 105.25)],
}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The bodies that were sent to a collector on loopback, to which OpenTelemetry's variable points."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield bodies
        server.shutdown()


def run(folder: Path) -> list[str]:
    """Three steps as a run logs them: the file of calls, which has the last ones, is written after each line."""
    services = Services.start(["opentelemetry"], "project", "name", {}, folder)
    warnings = services.log({"val-core/a/acc/mean@1": 0.5}, 0)
    write_calls([], folder / TIMELINE_FILE)
    for step in CALLS:
        warnings += services.log({"critic/score/mean": step / 2, "other": 1.0, "timing_s/step": 3.0}, step)
        warnings += services.log_samples([{"input": "x"}], step)
        write_calls([call for known in (step - 1, step) for call in CALLS.get(known, [])], folder / TIMELINE_FILE)
    return warnings + services.close()


def test_a_collector_gets_each_step_with_its_calls(collector, tmp_path, monkeypatch):
    """A trace for each step: its calls once, their pools, times and parent, and the metrics of the console's line.
    Calls of an earlier life of the run are no step's.

    Would not catch what a backend makes of the names.
    """
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    write_calls([PhaseRun("driver", "adv", 1.0, 2.0)], tmp_path / TIMELINE_FILE)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=mine")
    assert run(tmp_path) == []
    resources = [one for body in collector for one in ExportTraceServiceRequest.FromString(body).resource_spans]
    named = {one.key: one.value.string_value for one in resources[0].resource.attributes}
    assert named.items() >= {"service.name": "project", "service.instance.id": "name", "team": "mine"}.items()
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    steps = {span.attributes[0].value.int_value: span for span in spans if span.name == "step"}
    assert sorted(steps) == [1, 2, 3] and len({span.trace_id for span in steps.values()}) == 3
    for step, root in steps.items():
        below = [span for span in spans if span.parent_span_id == root.span_id]
        found = [
            (one.attributes[0].value.string_value, one.name, one.start_time_unix_nano, one.end_time_unix_nano)
            for one in below
        ]
        assert found == [(one.lane, one.name, int(one.start * 1e9), int(one.stop * 1e9)) for one in CALLS[step]]
        assert {span.trace_id for span in below} == {root.trace_id} and not root.parent_span_id
        assert root.start_time_unix_nano == found[0][2] and root.end_time_unix_nano == found[-1][3]
        numbers = {one.key: one.value.double_value for one in root.attributes[1:]}
        assert numbers == {"critic/score/mean": step / 2, "timing_s/step": 3.0}
    assert len(spans) == 3 + sum(map(len, CALLS.values()))


def test_a_collector_that_is_away_stops_nothing(tmp_path, monkeypatch):
    """Nobody listens: no step waits, and the end waits no longer than the variable says. Would not catch one that takes
    the bytes and never answers.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    started = time.monotonic()
    assert run(tmp_path) == []
    assert time.monotonic() - started < 10
