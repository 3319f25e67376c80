"""Dates of weekly tests: what is written of a test, and what is said of those that have not run for long."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from weekly_runs import WeeklyRuns, recorded, report

TODAY = date(2026, 3, 20)
OF_FILE = {
    "tests/a.py::new": {"date": "2026-03-06", "outcome": "passed"},
    "tests/a.py::old": {"date": "2026-03-05", "outcome": "failed"},
    "tests/b.py::older": {"date": "2026-01-31", "outcome": "passed"},
}


def test_what_has_not_run_for_fourteen_days_is_counted() -> None:
    """By file, with the oldest date; a last failure is named. Would not catch a clock that is wrong."""
    lines = report([*OF_FILE, "tests/b.py::new"], OF_FILE, TODAY)
    assert lines == [
        "Weekly tests that have not run here for 14 days: 3 of 4",
        "  failed on 2026-03-05: tests/a.py::old",
        "  tests/a.py: 1 last on 2026-03-05 or later",
        "  tests/b.py: 1 never, 1 last on 2026-01-31 or later",
    ]
    assert report(["tests/a.py::new"], OF_FILE, TODAY) == ["Weekly tests that have not run here for 14 days: 0 of 1"]


@pytest.mark.parametrize("text", [None, "", "{"])
def test_each_weekly_test_is_dated_once_it_has_ended(tmp_path: Path, text: str | None) -> None:
    """A failure after the test itself counts; other tests are not written. Would not catch two runs at one moment."""
    file, before = tmp_path / "outputs" / "weekly.json", date.today()
    if text is not None:
        file.parent.mkdir()
        file.write_text(text)
    runs = WeeklyRuns(file)
    for name, weekly, when, outcome in (
        ("good", True, "setup", "passed"),
        ("good", True, "call", "passed"),
        ("good", True, "teardown", "passed"),
        ("left over", True, "call", "passed"),
        ("left over", True, "teardown", "failed"),
        ("lacks", True, "setup", "skipped"),
        ("daily", False, "call", "passed"),
    ):
        keywords = {"weekly": 1} if weekly else {}
        runs.pytest_runtest_logreport(pytest.TestReport(name, ("", 0, ""), keywords, outcome, None, when))
    assert {test: said["outcome"] for test, said in recorded(file).items()} == {
        "good": "passed",
        "left over": "failed",
        "lacks": "skipped",
    }
    assert all(before <= date.fromisoformat(said["date"]) <= date.today() for said in recorded(file).values())
