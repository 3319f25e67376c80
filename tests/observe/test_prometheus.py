"""Metrics as Prometheus scrapes them, over HTTP, and the dashboard that asks for them."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_rl.errors import ConfigError
from megatron_rl.observe import prometheus
from megatron_rl.observe.picture_style import STACKED
from megatron_rl.observe.prometheus import PHASES, PrometheusExporter
from megatron_rl.observe.services import Services
from megatron_rl.observe.step_line import FIELDS

DASHBOARD = Path(__file__).parents[2] / "configs/grafana_dashboard.json"


def scraped(port: int) -> dict[tuple[str, str], float]:
    """(name, label or "") -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, "".join(sample.labels.values())): sample.value for family in families for sample in family.samples
    }


def test_the_last_step_is_scraped():
    """Names of metrics as they are, phases by their own label. Would not catch a scrape amid a step."""
    services = Services.start([], "project", "name", {}, Path(), port=0)
    exporter = services.exporter
    assert services.log({"critic/score/mean": 0.25, "val-core/a b/acc": 1.0}, 1) == []
    assert services.log({"critic/score/mean": 0.5, "timing_s/gen": 2.0, "perf/memory_gb/gen": 1.5}, 2) == []
    found = scraped(exporter.port)
    assert found["megatron_rl_step", ""] == 2
    assert found["megatron_rl_metric", "critic/score/mean"] == 0.5
    assert found["megatron_rl_metric", "val-core/a b/acc"] == 1.0
    assert found["megatron_rl_phase_seconds", "gen"] == 2.0
    assert found["megatron_rl_phase_memory_gigabytes", "gen"] == 1.5
    assert 0 < found["megatron_rl_exporter_seconds_total", ""] < 1
    assert services.log_samples([{"input": "x"}], 2) == services.close() == []
    with pytest.raises(urllib.error.URLError):
        scraped(exporter.port)


def test_a_port_that_is_taken_is_refused():
    first = PrometheusExporter(0)
    with pytest.raises(ConfigError, match=rf"trainer\.prometheus\.port={first.port} must be a free port on"):
        PrometheusExporter(first.port)
    first.close()


def test_200_metrics_and_a_scrape_cost_a_step_of_a_second_half_a_percent():
    """In CPU seconds, the exporter's own and the whole process's, client and server included. Would not catch a scrape
    that holds up the driver's other threads, which are few: Python has one lock.
    """
    exporter = PrometheusExporter(0)
    metrics = {f"group/{number}/mean": 0.5 for number in range(200)}
    exporter.log(metrics, 0)
    counted, started = scraped(exporter.port)["megatron_rl_exporter_seconds_total", ""], time.process_time()
    for step in range(1, 11):
        exporter.log(metrics, step)
        urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=30).read()
    spent = (time.process_time() - started) / 10
    own = (scraped(exporter.port)["megatron_rl_exporter_seconds_total", ""] - counted) / 11
    print(f"{own:.6f} s of the exporter and {spent:.6f} s of the process, for 200 metrics and a scrape")
    assert 0 < own < spent and own <= 0.005
    exporter.close()


def test_the_dashboard_asks_for_metrics_that_there_are():
    """Would not catch a query that Grafana cannot read."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    gauges = {f"megatron_rl_{name}" for name, _ in PHASES.values()} | {"megatron_rl_step", "megatron_rl_metric"}
    assert {name for query in queries for name in re.findall(r"megatron_rl_\w+", query)} <= gauges
    ours = (
        {name for name, _, _ in FIELDS}
        | {"timing_s/step"}
        | {"rollout/idle_share", "trainer/idle_share", "staleness/mean"}
    )
    ours |= {"rollout/replicas", "rollout/replicas_lost", "rollout/truncated", "rollout/resampled"}
    assert {name for query in queries for name in re.findall(r'name="([^"]+)"', query)} <= ours
    assert {name for query in queries for name in re.findall(r'phase="(\w+)"', query)} <= STACKED.keys() | {"step"}


def test_a_peer_that_says_nothing_does_not_stay(monkeypatch):
    """It would keep a thread and a descriptor. Would not catch one that says a byte now and then."""
    monkeypatch.setattr(prometheus, "REQUEST_S", 0.1)
    exporter = PrometheusExporter(0)
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=60) as peer:
        assert peer.recv(1) == b""
    exporter.close()
