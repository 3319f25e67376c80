"""The demo while Prometheus scrapes it: what the exporter costs a step."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from short_runs import LOCAL, reached

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

STEPS = 4


def scraped(address: str) -> dict[str, float]:
    """Name -> value of the metrics without labels."""
    with urllib.request.urlopen(address, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


def test_the_exporter_costs_a_step_half_a_percent_at_most(command_line) -> None:
    """One process, whole batches, scraped every second, which is fifteen times as often as Prometheus does by default:
    the exporter's own CPU seconds, of logging and of scrapes, beside the seconds of all steps.

    Would not catch what the lock of Python makes others wait.
    """
    keys = ("trainer.prometheus.port=0", f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false")
    run = command_line(*keys, "trainer.test_freq=5040", "trainer.export_hf=false", *LOCAL)
    run.wait_for(lambda: "metrics for Prometheus: " in run.text())
    address = re.search(r"metrics for Prometheus: (\S+)", run.text())[1]
    last: dict[str, float] = {}
    while run.process.poll() is None:
        try:
            last = scraped(address)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert reached(run, STEPS)(), run.text()  # it has ended
        time.sleep(1)
    assert run.wait() == 0, run.text()
    seconds = sum(line["timing_s/step"] for line in logged(run))
    share = last["megatron_rl_exporter_seconds_total"] / seconds
    print(f"{last['megatron_rl_exporter_seconds_total']:.4f} s of {seconds:.1f} s: {share:.4%}")
    assert last["megatron_rl_step"] >= STEPS - 1 and 0 < share <= 0.005
    # 256 sequences at once, of up to 24 tokens in two blocks of 16, of 1023 blocks in 64 MiB, of which vLLM keeps one.
    assert [line["perf/kv_cache_usage"] for line in logged(run)] == pytest.approx([2 * 256 / 1022] * STEPS)


def logged(run) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics().splitlines() if "timing_s/step" in line]
