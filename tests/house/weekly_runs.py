"""When each weekly test ran last on this machine, and how it ended: every run writes it, `make test-weekly` reports it.

The file is in `outputs/`, beside what the nightly leaves: git ignores it, and `make clean` keeps it. A committed file
would change with every run, and would say in one checkout what only another has proved.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from pathlib import Path

import pytest

DAYS = 14
FILE = Path(__file__).parents[2] / "outputs" / "weekly_tests.json"
NEVER = "never"


class WeeklyRuns:
    """A plugin that keeps `file`: test -> date and outcome of its last run."""

    def __init__(self, file: Path = FILE) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a weekly test's outcome: that of its call, or of what failed or skipped around it."""
        if "weekly" not in report.keywords or (report.when != "call" and report.passed):
            return
        seen = recorded(self.file) | {report.nodeid: {"date": str(date.today()), "outcome": report.outcome}}
        self.file.parent.mkdir(exist_ok=True)
        whole = self.file.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(seen, indent=0, sort_keys=True) + "\n")
        whole.replace(self.file)

    def pytest_report_collectionfinish(self, config: pytest.Config, items: list[pytest.Item]) -> list[str]:
        """Say what has not run for long where weekly tests are asked for."""
        if config.option.markexpr != "weekly":
            return []
        return report([item.nodeid for item in items], recorded(self.file), date.today())


def recorded(file: Path) -> dict[str, dict[str, str]]:
    """Return what a file says of each test; nothing where there is none, or where it is no JSON."""
    try:
        return json.loads(file.read_text())
    except (OSError, json.JSONDecodeError):
        return {}


def report(tests: Iterable[str], seen: Mapping[str, Mapping[str, str]], today: date) -> list[str]:
    """Return lines for people: of each file, how many tests have not run for `DAYS` days, and which failed last."""
    old: dict[str, list[str]] = defaultdict(list)
    lines, number = [], 0
    for test in tests:
        number += 1
        last = seen.get(test, {"date": NEVER, "outcome": ""})
        if last["date"] == NEVER or date.fromisoformat(last["date"]) < today - timedelta(days=DAYS):
            old[test.partition("::")[0]].append(last["date"])
        if last["outcome"] == "failed":
            lines.append(f"  failed on {last['date']}: {test}")
    for file, dates in old.items():
        never = dates.count(NEVER)
        since = [f"{never} never"] if never else []
        if never < len(dates):
            since.append(f"{len(dates) - never} last on {min(dates)} or later")
        lines.append(f"  {file}: {', '.join(since)}")
    count = sum(map(len, old.values()))
    return [f"Weekly tests that have not run here for {DAYS} days: {count} of {number}", *lines]
