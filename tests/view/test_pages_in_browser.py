"""Pages in a real browser: clicks, keys, colours, widths, and that nothing of a run is taken for HTML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, needs_chromium, numbers_of_step
from hand_made import recorded
from test_page_data import METRICS, made_run
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.observe.sample_files import RecordedStep, write_step

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_goes_wrong(browser: Browser) -> Iterator[None]:
    """No test's page throws, and none asks for anything but itself."""
    yield
    assert browser.problems == []
    assert {url.partition(":")[0] for url in browser.requests} <= {"file", "about"}


def page_of(*runs: Path) -> Path:
    out = runs[0] / "view.html"
    assert CliRunner().invoke(app, ["view", *map(str, runs), "--out", str(out)], catch_exceptions=False).exit_code == 0
    return out


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(made_run(tmp_path_factory.mktemp("one") / "run"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    return page_of(made_run(folder / "first"), made_run(folder / "second", lr=1e-3))


def test_numbers_of_a_step_are_those_of_its_line(browser, page):
    """Each of them, with all digits. Would not catch a metric that no step has."""
    browser.open(page, "steps")
    for line in METRICS[1:]:
        shown = numbers_of_step(browser, line["step"])
        assert shown == {name: value for name, value in line.items() if name != "step" and value is not None}


def test_a_token_has_the_numbers_of_its_record(browser, page):
    """By a click and by keys. Would not catch a colour that misleads."""
    browser.open(page, "samples")
    browser.click(".tok", 4)
    rows = (
        "Object.fromEntries([...document.querySelectorAll('.token-numbers tr')].map((row) =>"
        " [row.children[0].textContent, Number(row.children[1].dataset.value)]))"
    )
    expected = {"version": 4, "engine": -0.5, "trainer": -0.25, "difference": 0.25, "ratio": 1.2840254, "advantage": 1}
    assert browser.value(rows) == expected | {"loss": -0.25}
    browser.key("ArrowRight")
    assert browser.value(rows)["loss"] == -0.125 and browser.texts(".chosen") == ["<eos>"]
    browser.key("j")
    assert "step 6, sample 1" in browser.texts(".life h3")[0]


def test_turns_and_colours_of_tokens(browser, page):
    browser.open(page, "samples")
    assert browser.texts(".tokens .read") == ["1+1="] and browser.texts(".tokens .turn") == ["2<eos>"]
    style = "getComputedStyle(document.querySelectorAll('.tok')[4]).backgroundColor"
    assert browser.value(style) == "rgba(11, 122, 117, 0.6)"  # the largest advantage of the sample
    browser.key("c")
    assert browser.value("colour.value") == "loss_terms" and browser.value(style) == "rgba(209, 73, 91, 0.6)"


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("search.value = '1+1=3'", 1),
        ("least.value = 0.5", 3),
        ("most.value = 0.25", 2),
        ("document.getElementById('by-data_source').value = 'held'", 1),
        ("document.getElementById('by-step').value = '6'", 4),
        ("document.getElementById('by-outcome').value = 'cut off'", 1),
        ("document.getElementById('by-kind').value = 'validation'", 1),
        ("search.value = 'onerror'", 1),
        ("search.value = 'nowhere'", 0),
    ],
)
def test_filters(browser, page, change, left):
    browser.open(page, "samples")
    browser.value(
        f"{change}; for (const one of document.querySelectorAll('.filters > *'))"
        " { one.dispatchEvent(new Event('input')); one.dispatchEvent(new Event('change')); }"
    )
    assert browser.texts("#count") == [f"{left} of 5 samples here; 5 in the files"]
    assert len(browser.texts(".row")) == left


def test_what_a_model_writes_is_text(browser, page):
    """Tags in tokens and in tables, the end of a script. Would not catch a link that a user is tempted to follow."""
    browser.open(page, "samples")
    browser.key("j")
    browser.key("j")
    assert browser.texts(".tokens") == ["</script>7"]
    browser.click(".row", 4)
    assert "4 <img src=x onerror=alert(1)>" in browser.texts(".life .turn")
    assert browser.value("document.querySelectorAll('main img, main b, main script').length") == 0


def test_charts_say_values_and_zoom(browser, page):
    browser.open(page, "curves")
    browser.until("document.querySelector('.chart canvas')?.width > 300")
    browser.hover(".chart canvas")
    assert browser.texts(".chart .tip")[0] in ("step 0\nsums/acc/mean@1: 0.25", "step 3\nsums/acc/mean@1: 0.75")
    browser.drag(".chart canvas", 0.5, 0.9)
    low, high = map(float, browser.value("document.querySelector('canvas').dataset.range").split())
    assert 0.9 < low < 1.7 and 2.3 < high < 3
    browser.value("document.querySelector('canvas').focus()")
    browser.key("0")
    assert browser.value("document.querySelector('canvas').dataset.range") == "0 3"
    browser.key("ArrowRight")
    assert browser.texts(".chart .tip")[0].startswith("step 3")


def test_the_timeline_has_a_lane_for_each_replica(browser, page):
    """In the colours of all pictures. Would not catch a bar that is too short to be seen."""
    browser.open(page, "time")
    browser.until("document.querySelectorAll('.chart')[1]?.chart")
    assert browser.value("document.querySelectorAll('.chart')[1].chart.spec.lanes") == ["rollout_pool/0", "driver"]
    bars = browser.value("document.querySelectorAll('.chart')[1].chart.spec.bars")
    assert {bar["label"]: bar["color"] for bar in bars} == {"slice": "#3aa6a0", "adv": "#8cb369"}


def test_the_plan_and_two_runs(browser, two):
    """Would not catch two runs whose steps have nothing in common."""
    browser.open(two, "plan")
    assert browser.texts(".plan tr")[1] == "genGB1.251.51.2"
    assert "optim.lr0.00010.001" in browser.texts("#differences tr")
    browser.open(two, "samples")
    assert [text.partition(":")[0] for text in browser.texts(".life h3")] == ["first", "second"]
    browser.open(two, "curves")
    browser.until("document.querySelector('.chart .legend')")
    assert browser.texts(".chart .legend")[0] == "first: sums/acc/mean@1second: sums/acc/mean@1"


def test_keys_and_the_dark_page(browser, page):
    browser.open(page)
    browser.key("4")
    assert browser.value("location.hash") == "#samples"
    browser.key("/")
    assert browser.value("document.activeElement.id") == "search"
    browser.key("Escape")
    before = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.key("d")
    assert {before, browser.value("getComputedStyle(document.body).backgroundColor")} == {
        "rgb(255, 255, 255)",
        "rgb(20, 25, 31)",
    }
    browser.key("?")
    assert browser.value("document.getElementById('keys').open")


@pytest.mark.parametrize("tab", ["curves", "time", "steps", "samples", "plan"])
def test_a_narrow_page_does_not_scroll_sideways(browser, two, tab):
    """375 pixels. Would not catch letters that are too small."""
    browser.open(two, tab, width=375, height=800)
    assert browser.value("document.documentElement.scrollWidth") <= 375
    assert browser.value("parseFloat(getComputedStyle(document.body).fontSize)") >= 14


def many(number: int) -> RecordedStep:
    """One step of `number` episodes of 102 tokens, 60 of them drawn."""
    import numpy as np

    ones, lengths = np.linspace(-1, 1, 60 * number).astype(np.float32), np.full(number, 60)
    columns = {
        "sampled": np.tile(np.arange(102) >= 42, number),
        "scores": np.zeros(number, np.float32),
        "groups": np.arange(number),
        **dict.fromkeys(("rollout_log_probs", "old_log_probs", "advantages", "loss_terms", "rewards", "returns"), ones),
    }
    sizes = dict.fromkeys([name for name in columns if name not in ("scores", "groups")], lengths)
    row = recorded().rows[0] | {"tokens": ["token "] * 102}
    rows = [row | {"index": at, "output": f"answer {at}"} for at in range(number)]
    totals = {"loss": 0.0, "loss_magnitude": 1.0}
    return RecordedStep(1, number, columns, sizes | {"sampled": np.full(number, 102)}, rows, totals)


@pytest.mark.quiet
@pytest.mark.exhaustive
def test_a_thousand_episodes_are_there_in_two_seconds(browser, tmp_path):
    """From the request to the first paint, and to the end of the program. Would not catch a slower machine."""
    run = made_run(tmp_path / "run")
    write_step(run / "samples", many(1000))
    browser.open(page_of(run), "samples")
    assert browser.texts("#count")[0].startswith("1000 of ") or browser.texts("#count")[0].startswith("1005 of ")
    paint = browser.value("performance.getEntriesByName('first-paint')[0].startTime")
    ready = browser.value("performance.getEntriesByType('navigation')[0].loadEventEnd")
    print(json.dumps({"first paint ms": paint, "loaded ms": ready, "bytes": (run / "view.html").stat().st_size}))
    assert paint <= 2000 and len(browser.texts(".row")) < 60
