"""The user's verdicts on groups: real processes, and the same function in this process."""

from __future__ import annotations

import pytest

from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.scoring.user_verdict import UserVerdicts, VerdictHere, VerdictProcesses, VerdictSource

pytestmark = pytest.mark.timeout(60)

OBEDIENT = """
import os, time, numpy
def keep_group(rows):
    print(rows[0]["do"])
    return eval(rows[0]["do"])
"""
BAD = {
    "1 / 0": ("raised", "ZeroDivisionError: division by zero"),
    "None": ("no_verdict", "the group filter returned None; it must return True or False"),
    "0.5": ("no_verdict", "returned 0.5"),
    "os._exit(3)": ("crashed", "exited with code 3"),
    "time.sleep(1000)": ("timed_out", "the group filter did not return in reward_model.timeout_s=1"),
}


@pytest.fixture
def source(tmp_path):
    def write(text=OBEDIENT):
        (tmp_path / "mine.py").write_text(text)
        return VerdictSource(str(tmp_path / "mine.py"), "keep_group", str(tmp_path / "prints.txt"))

    return write


def groups(*orders: str):
    return [[{"do": order}] if order else [] for order in orders]


def test_verdicts_in_order_and_failures_by_kind(source):
    """A failed verdict keeps nothing; a group without rows is not asked about. Would not catch a class of bool."""
    said: list[str] = []
    with UserVerdicts(VerdictProcesses(source(), 1.0), said.append) as verdicts:
        orders = ["True", *BAD, "False", "", "numpy.bool_(True)"]
        assert verdicts(groups(*orders)) == [True, *[False] * 7, True]
        assert said == ["5 of 8 verdicts on groups failed; the first: " + said[0].partition("first: ")[2]]
        counts = {f"filter_groups/{kind}": 1.0 for kind, _ in BAD.values()} | {"filter_groups/no_verdict": 2.0}
        assert verdicts.metrics() == counts | {"filter_groups/kept_ratio": 2 / 8}
        judged = verdicts._processes.judge(groups(*BAD))
    for verdict, (kind, reason) in zip(judged, BAD.values(), strict=True):
        assert (verdict.is_kept, verdict.failure) == (False, kind) and reason in verdict.reason
    assert "mine.py, line 5" in judged[0].reason


def test_all_verdicts_failing_stop_the_run_unless_allowed(source, capsys, tmp_path):
    """In this process, where further prints go to the file. Would not catch one good verdict in a thousand."""
    here = VerdictHere(source())
    with pytest.raises(RewardError, match=r"2 of 2 .*ZeroDivisionError.*\(algorithm.filter_groups.path\)"):
        UserVerdicts(here, print)(groups("1 / 0", "1 / 0"))
    assert UserVerdicts(here, str, stop_if_all_failed=False)(groups("1 / 0", "")) == [False, False]
    UserVerdicts(here, str)(groups(*["True"] * 4))
    assert "the group filter prints more than 5 times" in capsys.readouterr().out
    assert (tmp_path / "prints.txt").read_text() == "True\nTrue\n"
    with pytest.raises(ConfigError, match=r"algorithm\.filter_groups\.path=.*callable as keep_group\(rows\)"):
        source("def keep_group(): ...").load()
