"""The nightly gate's comparison, exit codes and report, on recorded metrics."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.errors import ConfigError
from megatron_rl.trials.golden import Band, Golden, read_golden, write_golden
from megatron_rl.trials.nightly import REPORT, Night, Verdict, nightly_trial, report, reported, verdict_of
from megatron_rl.trials.trial import read_metrics
from megatron_rl.trials.trial_outcome import Attempt

REPOSITORY = Path(__file__).parents[2]
GOLDEN = Golden(
    3, 1, 600.0, 60.0,
    {
        "score": Band((0.5, 0.6, 0.7), below=0.1),
        "length": Band((4.0, 4.0, 4.0), below=0.25, above=0.5),
        "speed": Band((100.0,), below=0.3, relative=True, over="median"),
    },
)  # fmt: skip
GOOD = {
    1: {"score": 0.5, "length": 4.0, "speed": 10.0},
    2: {"score": 0.9, "length": 4.5, "speed": 90.0},
    3: {"score": 0.61, "length": 3.75, "speed": 95.0},
}
WELL = [Attempt(20, 9.0, 1, to_stop=True), Attempt(0, 9.0, 3)]


def failed(recorded) -> list[tuple[str, int | None]]:
    return [(one.metric, one.step) for one in GOLDEN.compare(recorded) if not one.passed]


def test_inside_all_bands_is_a_pass():
    """Far above an open side, on the edge of a closed one, and a slow first step that the median forgives."""
    assert failed(GOOD) == []
    assert verdict_of(WELL, GOLDEN.compare(GOOD)) is Verdict.PASS


@pytest.mark.parametrize(
    ("step", "metric", "value", "expected"),
    [
        (3, "score", 0.59, [("score", 3)]),
        (1, "length", 4.51, [("length", 1)]),
        (1, "length", 3.74, [("length", 1)]),
        (2, "score", math.nan, [("score", 2)]),
        (2, "speed", 69.0, [("speed", None)]),
    ],
)
def test_outside_one_band_is_a_regression(step, metric, value, expected):
    """Each names metric and step. By hand: 0.7 - 0.1, 4 + 0.5, 4 - 0.25; a median of 69 is below 100 - 30%."""
    recorded = {**GOOD, step: GOOD[step] | {metric: value}}
    assert failed(recorded) == expected
    assert verdict_of(WELL, GOLDEN.compare(recorded)) is Verdict.REGRESSION


def test_what_was_not_recorded_fails():
    """A step that is missing, and a metric that is nowhere."""
    assert failed({1: GOOD[1], 2: GOOD[2]})[:2] == [("score", 3), ("length", 3)]
    assert ("speed", None) in failed({step: {"score": 1.0, "length": 4.0} for step in (1, 2, 3)})


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([Attempt(21, 1, 1, to_stop=True), Attempt(0, 1, 3)], Verdict.PASS),
        ([Attempt(0, 1, 3, to_stop=True)], Verdict.PASS),  # it ended before it saw the signal
        ([Attempt(0, 1, 3)], Verdict.PASS),
        ([Attempt(-9, 1, 1, overran_s=60.0)], Verdict.HANG),
        ([Attempt(20, 1, 1, to_stop=True), Attempt(-9, 1, 1, overran_s=60.0)], Verdict.HANG),
        ([Attempt(2, 1, 0)], Verdict.INVALID_CONFIG),
        ([Attempt(3, 1, 1)], Verdict.CRASH),
        ([Attempt(-9, 1, 1)], Verdict.CRASH),
        ([Attempt(20, 1, 1)], Verdict.CRASH),  # somebody else stopped it
        ([Attempt(22, 1, 1, to_stop=True)], Verdict.CRASH),  # it could not save in time
        ([Attempt(20, 1, 1, to_stop=True), Attempt(1, 1, 2)], Verdict.CRASH),
        ([Attempt(20, 1, 1, to_stop=True)], Verdict.CRASH),  # it never went on
        ([], Verdict.CRASH),
    ],
)
def test_how_attempts_end_decides_first(attempts, expected):
    """Even where every metric is right."""
    assert verdict_of(attempts, GOLDEN.compare(GOOD)) is expected


def test_exit_codes_are_distinct_and_documented():
    """Would not catch a code that documentation explains wrongly."""
    codes = [verdict.value for verdict in Verdict]
    assert codes == [0, 2, 10, 11, 12]
    page = (REPOSITORY / "docs/plan/nightly.md").read_text()
    assert all(f"| {code} | {verdict.name.lower()}" in page for code, verdict in zip(codes, Verdict, strict=True))


def test_renewed_golden_passes_and_survives_the_file(tmp_path):
    """What was a regression is a pass once it is golden, with the same bands; a missing metric is refused."""
    worse = {step: values | {"score": 0.1 * step} for step, values in GOOD.items()}
    assert failed(worse)
    renewed = GOLDEN.renewed(worse)
    write_golden(renewed, tmp_path / "golden.json")
    assert read_golden(tmp_path / "golden.json") == renewed
    assert renewed.metrics["score"] == Band((0.1, 0.2, 0.3), below=0.1)
    assert renewed.metrics["speed"].values == (90.0,)
    assert all(one.passed for one in renewed.compare(worse))
    with pytest.raises(ConfigError, match="score of step 3"):
        GOLDEN.renewed({1: GOOD[1], 2: GOOD[2]})
    with pytest.raises(ConfigError, match="length of step 2"):
        GOLDEN.renewed({**GOOD, 2: GOOD[2] | {"length": math.nan}})


def test_wrong_golden_files_are_refused(tmp_path):
    """Missing, no JSON, an unknown key, too few values, no such step."""
    file = tmp_path / "golden.json"
    with pytest.raises(ConfigError, match=r"configs/nightly_golden.json"):
        read_golden(file)
    good = json.loads((REPOSITORY / "configs/nightly_golden.json").read_text())
    for wrong, says in (
        ("{", "no golden file"),
        ("[" * 100_000, "no golden file: RecursionError"),
        (json.dumps(good | {"steps": "4"}), "steps='4' must be a whole number"),
        (json.dumps(good | {"step_within_s": math.nan}), "step_within_s=nan must be a number of at most"),
        (json.dumps(good | {"metrics": {"a": {"values": [1, math.inf, 1, 1]}}}), "a: inf must be a number of at most"),
        (json.dumps(good | {"metrics": {"a": {"values": "four"}}}), "a: 'f' must be a number of at most"),
        (json.dumps(good | {"metrics": {"a": {"values": [10**400] * 4, "below": 0.5}}}), "a: 1000.* must be a number"),
        (json.dumps(good | {"stop_after": 1}), "stop_after"),
        (json.dumps(good | {"steps": 9}), "needs 9"),
        (json.dumps(good | {"stop_after_step": 4}), "stop_after_step=4"),
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=says):
            read_golden(file)


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    """Would not catch a torn line in the middle, which is an error."""
    file = tmp_path / "metrics.jsonl"
    assert read_metrics(file) == {}
    file.write_text('{"step": 1, "a": 2.0, "b": null}\n{"step": 2, "a"')
    assert read_metrics(file) == {1: {"step": 1, "a": 2.0}}


def test_report_says_what_failed_first():
    """One page: outcome, attempts, the failed comparison above the others, the end of the output."""
    recorded = {**GOOD, 3: GOOD[3] | {"length": 9.0}}
    attempts = [WELL[0], dataclasses.replace(WELL[1], output="first\n" * 100 + "last\n")]
    text = report(Verdict.REGRESSION, "megatron-rl nightly", attempts, GOLDEN.compare(recorded))
    assert text.startswith("# Nightly: regression (exit code 10)")
    assert "| 1 | 9 | 1 | SIGTERM, then exit code 20 |" in text
    rows = [line for line in text.splitlines() if line.startswith(("| score", "| length", "| speed"))]
    assert rows[0] == "| length | 3 | 9 | 4 | 3.75 to 4.5 | **out** |" and len(rows) == 7
    assert "last" in text and text.count("first") < 30
    killed = report(Verdict.HANG, "x", [Attempt(-9, 70, 1, overran_s=60.0)], [])
    assert "killed after 60 s without a step" in killed
    said = Night(Verdict.REGRESSION, attempts, GOLDEN.compare(recorded)).as_json()
    assert (said["verdict"], said["exit_code"], said["lives"][0]["last_step"]) == ("regression", 10, 1)
    assert [one["metric"] for one in said["comparisons"] if not one["passed"]] == ["length"]


def test_a_nightly_that_cannot_start_says_so_as_json(tmp_path):
    """The configuration's fault with code 2, and the report. Would not catch a nightly that trains."""
    given = ["--config", "configs/demo_cpu.yaml", "--folder", str(tmp_path / "night"), "trainer.seeed=1", "--json"]
    done = CliRunner().invoke(app, ["nightly", "--golden", str(REPOSITORY / "configs/nightly_golden.json"), *given])
    said = json.loads(done.stdout)
    assert (done.exit_code, said["verdict"], said["exit_code"]) == (2, "invalid_config", 2)
    assert "trainer.seed" in said["error"] and (tmp_path / "night" / REPORT).is_file()


YESTERDAY = "# Nightly: pass (exit code 0)\n"


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (ConfigError("no golden file at x"), ["# Nightly: invalid config (exit code 2)", "no golden file at x"]),
        (SystemExit(143), ["# Nightly: interrupted (exit code 143)"]),
        (KeyboardInterrupt(), ["# Nightly: interrupted (exit code 130)"]),
        (ZeroDivisionError("by 0"), ["# Nightly: crash (exit code 1)", "by 0"]),
        (None, ["# Nightly: not ended", "It is at work, or it was killed."]),
    ],
)
def test_every_outcome_has_a_report_of_its_own(tmp_path, end, says):
    """In place of yesterday's. Would not catch a disk that is full for the report."""
    (tmp_path / REPORT).write_text(YESTERDAY)
    with pytest.raises(BaseException) if end else nullcontext(), reported(tmp_path, "megatron-rl nightly x=1"):
        assert "not ended" in (tmp_path / REPORT).read_text()
        if end:
            raise end
    text = (tmp_path / REPORT).read_text()
    assert all(part in text for part in [*says, "    megatron-rl nightly x=1\n"]) and "pass" not in text
    with pytest.raises(ConfigError, match="holds files of something else"), reported(tmp_path.parent, ""):
        pass


def test_a_folder_of_something_else_stays_as_it_is(tmp_path):
    """Whose report is not a nightly's, or that has more than a run's output. A link and a pipe are replaced."""
    mine, file = tmp_path / "mine", tmp_path / "precious"
    mine.mkdir()
    file.write_text(YESTERDAY)
    for name in (REPORT, "output.txt"):
        (mine / name).write_text("years of work")
        with pytest.raises(ConfigError, match="holds files of something else"), reported(mine, ""):
            pass
        assert (mine / name).read_text() == "years of work"
        (mine / name).rename(mine / "thesis.txt")
    (mine / "thesis.txt").unlink()
    (mine / REPORT).symlink_to(file)
    with reported(mine, ""):
        assert file.read_text() == YESTERDAY and not (mine / REPORT).is_symlink()
    (tmp_path / "link").symlink_to(mine)
    trial = nightly_trial(GOLDEN, tmp_path, tmp_path / "link", ())
    assert trial.folder == mine and [path.name for path in mine.iterdir()] == [REPORT]
    (mine / REPORT).unlink()
    os.mkfifo(mine / REPORT)
    (mine / "output.txt").touch()
    with pytest.raises(ConfigError, match="holds files of something else"), reported(mine, ""):
        pass


def test_the_printed_line_sends_what_happened(tmp_path):
    """The line for cron of docs/plan/nightly.md, in a folder without an environment, the day after a pass. Would not
    catch what cron itself does with it."""
    page = (REPOSITORY / "docs/plan/nightly.md").read_text()
    [line] = [row for row in page.splitlines() if row.startswith("17 2 * * *")]
    for folder, file, text in (
        ("scripts", "nightly.sh", (REPOSITORY / "scripts/nightly.sh").read_text()),
        ("outputs/nightly", "report.md", YESTERDAY),
        ("bin", "mail", f'#!/bin/sh\n{{ echo "$@"; cat; }} >{tmp_path}/mail\n'),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / file).write_text(text)
    (tmp_path / "bin/mail").chmod(0o755)
    command = line.removeprefix("17 2 * * *").replace("/srv/megatron_rl", str(tmp_path))
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHON": "/bin/false"}
    subprocess.run(["sh", "-c", command], env=environment, check=True)
    sent = (tmp_path / "mail").read_text()
    assert sent.startswith("-s nightly: 2 team\n# Nightly: not begun") and "run first: make install" in sent
    assert "pass" not in sent
