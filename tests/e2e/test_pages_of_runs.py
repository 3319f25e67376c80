"""Pages of real runs in a real browser: three steps of the demo, of generation ahead of training, and of an agent."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from browser import Browser, needs_chromium, numbers_of_step
from command_line import REPOSITORY
from recorded_runs import RecordedRun
from safetensors.numpy import load_file
from short_runs import WITHOUT_RAY
from sweeps import WEEKLY
from typer.testing import CliRunner

from megatron_rl.cli import app

pytestmark = [*needs_chromium, *WEEKLY, pytest.mark.dist, pytest.mark.timeout(900)]

STEPS = 3
SHORT = (WITHOUT_RAY, f"trainer.total_training_steps={STEPS}", "trainer.test_freq=2", "trainer.recorded_prompts=4")
CONFIGS = {"demo": "demo_cpu.yaml", "async": "async_cpu.yaml", "agent": "agents/guess.yaml"}
TABS = ("curves", "time", "steps", "samples", "plan")
SEED = 5
NUM_SAMPLES, NUM_TOKENS = 12, 3
TOKEN_TABLE = (
    "Object.fromEntries([...document.querySelectorAll('.token-numbers tr')].map((row) =>"
    " [row.children[0].textContent, row.children[1].dataset.value]))"
)
LABELS = {
    "rollout_log_probs": "engine",
    "old_log_probs": "trainer",
    "advantages": "advantage",
    "versions": "version",
    "loss_terms": "loss",
}
"""Column of the record -> what the page calls it."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(params=CONFIGS)
def run(request: pytest.FixtureRequest, recorded: Callable[..., RecordedRun]) -> RecordedRun:
    """A run of a configuration of the project, and of nothing else."""
    if request.param == "agent":
        subprocess.run(
            [sys.executable, "scripts/make_agent_assets.py", "guess"], cwd=REPOSITORY, check=True, timeout=600
        )
    return recorded(f"page of {request.param}", *SHORT, config=f"configs/{CONFIGS[request.param]}")


@pytest.fixture
def page(run: RecordedRun, tmp_path: Path) -> Path:
    out = tmp_path / "view.html"
    done = CliRunner().invoke(app, ["view", str(run.run), "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    return out


def lines_of(run: RecordedRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics().splitlines()]


def records_of(run: RecordedRun) -> dict[int, tuple[dict[str, np.ndarray], dict[str, Any]]]:
    """Step -> (tensors, details) of its file of samples, read without the project's reader."""
    found = {}
    for file in sorted((run.run / "samples").glob("*.safetensors")):
        tensors = load_file(file)
        found[int(file.stem)] = tensors, json.loads(tensors.pop("details").tobytes())
    return found


def of_row(tensors: dict[str, np.ndarray], name: str, row: int) -> np.ndarray:
    """A row's part of a ragged column."""
    ends = tensors[f"{name}/lengths"].cumsum()
    return tensors[name][ends[row] - tensors[f"{name}/lengths"][row] : ends[row]]


def test_every_tab_at_two_widths(browser: Browser, run: RecordedRun, page: Path) -> None:
    """Nothing throws, nothing is asked of the network, nothing scrolls sideways, charts are drawn.

    Would not catch a chart that is drawn wrongly; numbers are below.
    """
    for width, tab in ((width, tab) for width in (1200, 375) for tab in TABS):
        browser.open(page, tab, width=width, height=800)
        assert browser.value("document.documentElement.scrollWidth") <= width, (width, tab)
        browser.until("document.getElementById('main').innerText.length > 50")
        if tab in ("curves", "time"):
            browser.until("document.querySelector('.chart canvas')?.width > 200")
    assert browser.problems == [] and {url.partition(":")[0] for url in browser.requests} <= {"file", "about"}
    assert f"(step {STEPS})" in browser.texts("#runs")[0]


def test_numbers_of_steps_are_those_of_the_run(browser: Browser, run: RecordedRun, page: Path) -> None:
    """All digits of every metric, in the table; curves and bars have the same; medians beside the plan.

    Would not catch a metric that the run itself logged wrongly.
    """
    lines = lines_of(run)
    browser.open(page, "steps")
    for line in lines:
        shown = numbers_of_step(browser, line["step"])
        assert shown == {name: value for name, value in line.items() if name != "step" and value is not None}
    browser.open(page, "time")
    browser.until("document.querySelector('.chart canvas')?.width > 200")
    specs = browser.value("[...document.querySelectorAll('.chart')].map((one) => one.spec)")
    for series in specs[0]["series"]:
        name = f"timing_s/{series['label']}"
        assert list(zip(series["xs"], series["ys"], strict=True)) == [
            (line["step"], line[name]) for line in lines if name in line
        ]
    calls = json.loads((run.run / "timeline.json").read_text())
    first = min(call["start"] for call in calls)
    assert [(specs[1]["lanes"][bar["lane"]], bar["label"], bar["start"], bar["stop"]) for bar in specs[1]["bars"]] == [
        (call["lane"], call["name"], call["start"] - first, call["stop"] - first) for call in calls
    ]
    browser.open(page, "plan")
    shown = dict(
        browser.value(
            "[...document.querySelectorAll('.plan tr')].slice(1)"
            ".filter((row) => row.children[1].textContent == 'seconds')"
            ".map((row) => [row.children[0].textContent, row.children[3].title])"
        )
    )
    for phase in ("step", "update_actor"):
        assert float(shown[phase]) == median(line[f"timing_s/{phase}"] for line in lines if f"timing_s/{phase}" in line)


def test_sampled_numbers_of_tokens_are_those_of_the_record(browser: Browser, run: RecordedRun, page: Path) -> None:
    """Some samples of all steps, some tokens of each, drawn from a seed: what the page shows is the file's float32.

    Would not catch a column that the record lacks; which are there is tests/controller/test_recorded_samples.py.
    """
    draw, seen = random.Random(SEED), 0
    records = records_of(run)
    assert sorted(records) == [1, 2, 3]
    browser.open(page, "samples")
    browser.value("document.getElementById('by-kind').value = 'training'")
    for step in records:
        tensors, details = records[step]
        browser.value(f"document.getElementById('by-step').value = '{step}', samples.filter()")
        for row in draw.sample(range(len(details["rows"])), NUM_SAMPLES // STEPS):
            browser.value(f"samples.choose({row})")
            assert browser.texts(".life h3") == [f"step {step}, sample {row}"]
            drawn = of_row(tensors, "sampled", row).astype(bool)
            texts = details["rows"][row]["tokens"]
            turns = [list(group) for _, group in groupby(range(len(texts)), key=lambda at: bool(drawn[at]))]
            expected = [("turn" if drawn[part[0]] else "read", "".join(texts[at] for at in part)) for part in turns]
            blocks = "[...document.querySelectorAll('.tokens > div')].map((one) => [one.classList[1], one.textContent])"
            assert [tuple(block) for block in browser.value(blocks)] == expected
            places = np.flatnonzero(drawn)
            for place in draw.sample(range(len(places)), min(NUM_TOKENS, len(places))):
                browser.click(".tok", int(places[place]))
                shown = browser.value(TOKEN_TABLE)
                for name, label in LABELS.items():
                    if name in tensors:
                        assert np.float32(shown[label]) == np.float32(of_row(tensors, name, row)[place]), (
                            step,
                            row,
                            name,
                        )
                        seen += 1
    assert seen >= NUM_SAMPLES * 4


def test_what_only_some_runs_have(browser: Browser, run: RecordedRun, page: Path) -> None:
    """Lanes of replicas where generation runs ahead, several turns where an agent plays.

    Would not catch turns of one token that are shown as two.
    """
    browser.open(page, "time")
    browser.until("document.querySelector('.chart canvas')?.width > 200")
    lanes = set(browser.value("[...document.querySelectorAll('.chart')].at(-1).spec.lanes"))
    assert ({"rollout_pool/0", "rollout_pool/1"} <= lanes) == ("async" in str(run.folder))
    turns = max(
        sum(value for value, _ in groupby(of_row(tensors, "sampled", row).astype(bool)))
        for tensors, details in records_of(run).values()
        for row in range(len(details["rows"]))
    )
    assert (turns > 1) == ("agent" in str(run.folder))
