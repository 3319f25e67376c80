"""Spans of a run's steps for OpenTelemetry: a trace for each step, and the calls of its phases below it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.observe.phase_clock import TIMELINE_FILE
from megatron_rl.observe.step_line import FIELDS

SHOWN = [*(name for name, _, _ in FIELDS), "timing_s/step"]
"""Metrics that a step's span has as attributes."""


class StepSpans:
    """Sends spans by OTLP over HTTP; OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, ...) say where to.

    A thread of the package sends them; what cannot be sent is the package's to say. Calls are those of timeline.json,
    which is written after a step is logged: each step is sent with the next one, the last at the end.
    """

    def __init__(self, project: str, name: str, settings: dict[str, Any], folder: Path) -> None:
        trace, resources = (importlib.import_module(f"opentelemetry.sdk.{part}") for part in ("trace", "resources"))
        sender = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
        self._below = importlib.import_module("opentelemetry.trace").set_span_in_context
        given = resources.OTELResourceDetector().detect()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, which win
        resource = resources.Resource({"service.name": project, "service.instance.id": name}).merge(given)
        self._provider = trace.TracerProvider(resource=resource)
        batches = importlib.import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(sender)
        self._provider.add_span_processor(batches)
        self._tracer = self._provider.get_tracer("megatron_rl")
        self._file = folder / TIMELINE_FILE
        self._seen: set[str] = set()
        self._logged: dict[str, float] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the step before, and keep this one's numbers."""
        self._send()
        self._logged = {"step": step} | {name: metrics[name] for name in SHOWN if name in metrics}

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Responses are no spans: nothing is done."""

    def close(self) -> None:
        """Send the last step, and wait for what is being sent, as long as the package's variables allow."""
        self._send()
        self._provider.shutdown()

    def _send(self) -> None:
        """Send the logged step with the calls that the file did not have before; without calls there is no span."""
        calls = self._new_calls()
        if not calls or not self._logged:
            return
        first, last = min(call["start"] for call in calls), max(call["stop"] for call in calls)
        step = self._tracer.start_span("step", start_time=nanoseconds(first), attributes=self._logged)
        for call in calls:
            span = self._tracer.start_span(
                call["name"],
                context=self._below(step),
                start_time=nanoseconds(call["start"]),
                attributes={"pool": call["lane"]},
            )
            span.end(nanoseconds(call["stop"]))
        step.end(nanoseconds(last))

    def _new_calls(self) -> list[dict[str, Any]]:
        try:
            calls = json.loads(self._file.read_text())
        except (OSError, ValueError):  # not written yet, or by something else
            return []
        by_text = {json.dumps(call): call for call in calls}
        known, self._seen = self._seen, set(by_text)
        return [call for text, call in by_text.items() if text not in known]


def nanoseconds(seconds: float) -> int:
    """Seconds since the epoch as OpenTelemetry has them."""
    return round(seconds * 1e9)
