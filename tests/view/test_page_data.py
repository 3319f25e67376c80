"""What a page shows against the records that it comes from, made by hand, and what `view` refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hand_made import recorded
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.errors import ConfigError
from megatron_rl.observe.picture_style import phase_color
from megatron_rl.observe.sample_files import write_step
from megatron_rl.view.page import as_script, escaped, page
from megatron_rl.view.page_data import differences, level, page_data, page_samples, plan_rows
from megatron_rl.view.run_files import read_run

METRICS = [
    {"step": 0, "val-core/sums/acc/mean@1": 0.25},
    {"step": 1, "actor/entropy": 0.5, "timing_s/gen": 2.0, "timing_s/step": 3.0, "perf/memory_gb/gen": 1.5}
    | {"perf/memory_planned_gb/gen": 1.25},
    {"step": 2, "actor/entropy": None, "timing_s/gen": 4.0, "timing_s/step": 6.0, "perf/memory_gb/gen": 1.0},
    {"step": 3, "actor/entropy": 0.125, "timing_s/gen": 3.0, "val-core/sums/acc/mean@1": 0.75},
]
CALLS = [
    {"lane": "rollout_pool/0", "name": "slice", "start": 100.5, "stop": 101.0},
    {"lane": "driver", "name": "adv", "start": 100.0, "stop": 100.25},
]


def made_run(folder: Path, lr: float = 1e-4, ended: bool = True, **more: str) -> Path:
    """A run's folder, with samples of step 6, a table of a validation after step 3, and a torn last line."""
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(line) + "\n" for line in METRICS)
    (folder / "metrics.jsonl").write_text(lines + '{"step": 4, "actor/ent')
    plan = {"config": {"trainer": {"validation_data_dir": str(folder / "val"), "seed": 1}, "optim": {"lr": lr}}}
    plan |= {"plan": {"time": {"seconds": {"gen": 1.0, "reshard": 0.5}}}}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "timeline.json").write_text(json.dumps(CALLS))
    if ended:
        (folder / "summary.json").write_text(json.dumps({"steps": 3}))
    write_step(folder / "samples", recorded())
    (folder / "val").mkdir()
    row = {"input": "2+2=", "output": "4 <img src=x onerror=alert(1)>", "gts": "4", "score": 1.0, "step": 3}
    (folder / "val/3.jsonl").write_text(json.dumps(row | {"data_source": "held", "failure": "timed_out"}) + "\n")
    return folder


def test_the_data_of_a_run_is_what_its_files_have(tmp_path):
    """Every metric of every step, and the calls from the first one on. Would not catch a file that nothing reads."""
    run = page_data([read_run(made_run(tmp_path / "run"))], 100)["runs"][0]
    logged = ((name, *pair) for name, pairs in run["metrics"].items() for pair in zip(*pairs, strict=True))
    pairs = {(name, step): value for name, step, value in logged}
    assert pairs == {(name, line["step"]): value for line in METRICS for name, value in line.items() if name != "step"}
    assert run["steps"] == [0, 1, 2, 3] and run["ended"] and run["summary"] == {"steps": 3}
    assert [(call["start"], call["stop"]) for call in run["calls"]] == [(0.5, 1.0), (0.0, 0.25)]
    assert not page_data([read_run(made_run(tmp_path / "on", ended=False))], 100)["runs"][0]["ended"]


def test_panels_and_colours_are_those_of_the_pictures(tmp_path):
    data = page_data([read_run(made_run(tmp_path / "run"))], 100)
    assert [panel["title"] for panel in data["panels"]] == ["Held-out accuracy", "Entropy (nats per token)"]
    assert data["panels"][0]["names"] == {"val-core/sums/acc/mean@1": "sums/acc/mean@1"}
    assert data["colors"] == {name: phase_color(name) for name in ("gen", "step", "slice", "adv")}
    assert data["stacked"] == ["gen", "adv"]


def test_the_plan_beside_the_measured():
    """The fullest step's memory, the median step's seconds, by hand. Would not catch another unit in the plan."""
    metrics = {
        "perf/memory_gb/gen": ([1, 2], [1.5, 1.0]),
        "perf/memory_planned_gb/gen": ([1], [1.25]),
        "timing_s/gen": ([1, 2, 3, 4], [2.0, 4.0, 3.0, None]),
        "timing_s/turns": ([1], [9.0]),
    }
    rows = plan_rows(metrics, {"plan": {"time": {"seconds": {"gen": 1.0, "reshard": 0.5}}}})
    assert [tuple(row.values()) for row in rows] == [
        ("GB", "gen", 1.25, 1.5),
        ("seconds", "gen", 1.0, 3.0),
        ("seconds", "reshard", 0.5, None),
        ("seconds", "turns", None, 9.0),
    ]
    assert plan_rows({}, None) == []


def test_keys_that_differ(tmp_path):
    plans = [read_run(made_run(tmp_path / name, lr)).plan for name, lr in (("a", 1e-4), ("b", 1e-3))]
    folders = [str(tmp_path / name / "val") for name in ("a", "b")]
    assert differences(plans) == [("trainer.validation_data_dir", *folders), ("optim.lr", 1e-4, 1e-3)]
    assert differences(plans[:1]) == differences([plans[0], None]) == []


@pytest.mark.parametrize(
    ("counts", "most", "number"),
    [([10, 10], 6, 3), ([1, 10, 10], 9, 4), ([5, 5], 100, 5), ([9, 9, 9], 2, 1), ([], 5, 1)],
)
def test_samples_are_spread_over_steps(counts, most, number):
    assert level(counts, most) == number


def test_samples_of_a_page(tmp_path):
    """Recorded ones and those of tables. Would not catch a table in a folder that the plan does not name."""
    records = [read_run(made_run(tmp_path / name)) for name in ("a", "b")]
    samples, total = page_samples(records, 100)
    assert total == len(samples) == 10 and [one["run"] for one in samples] == [0] * 5 + [1] * 5
    assert [(one["kind"], one["step"], one["row"]) for one in samples[:5]] == [
        *(("training", 6, row) for row in range(4)),
        ("validation", 3, 0),
    ]
    assert samples[0]["numbers"]["advantages"] == [1.0, 0.5] and samples[4]["outcome"] == "reward function timed out"
    assert len(page_samples(records, 4)[0]) == 2 * 4 and page_samples(records, 4)[1] == 10


def test_nothing_of_a_run_is_html(tmp_path):
    """Neither tags nor the end of a script, nor half a pair of UTF-16. Would not catch a program that reads data as
    HTML; the browser's test does.
    """
    texts = ["</script><script>alert(1)</script>", "<!--", "\ud83d", "@@DATA@@"]
    made = page({"texts": texts}, [], "<b>run</b>")
    found = re.search('<script type="application/json" id="data">(.*?)</script>', made)[1]
    assert json.loads(found) == {"texts": texts} and "<" not in found
    assert "<title>&lt;b&gt;run&lt;/b&gt;</title>" in made and made.count("<script>") == 4
    assert as_script(float("nan")) == "null" and escaped("a & <b>") == "a &amp; &lt;b&gt;"
    made.encode()


def view(*arguments: object):
    return CliRunner().invoke(app, ["view", *map(str, arguments)], catch_exceptions=False)


def test_view_writes_one_file(tmp_path):
    run = made_run(tmp_path / "run")
    assert "5 of 5 samples" in view(run).output and (run / "view.html").read_text().startswith("<!doctype html>")
    assert view(run, run, "--out", tmp_path / "two.html").exit_code == 0 and (tmp_path / "two.html").exists()


def test_view_refuses_what_is_no_run(tmp_path):
    """Each with what is nearest. Would not catch a folder that cannot be read."""
    run = made_run(tmp_path / "runs/good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new/metrics.jsonl").touch()
    for arguments, message in (
        ([tmp_path / "no"], "no is no folder; try: "),
        ([tmp_path / "empty"], "has no metrics.jsonl; try: trainer.default_local_dir"),
        ([tmp_path / "runs"], f"try: {run}"),
        ([tmp_path / "new"], "has no step yet"),
        ([run, tmp_path / "empty"], "has no metrics.jsonl"),
        ([run, "--out", tmp_path / "page.txt"], "must end in one of .html"),
        ([run, "--samples", "0"], "--samples 0 must be >= 1"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            view(*arguments)
    (run / "samples/7.safetensors").write_bytes(b"torn")
    assert "7.safetensors cannot be read as the samples of a step" in view(run).output
