"""From recorded steps to the numbers, ratios, table and picture of a report."""

from __future__ import annotations

import csv
import dataclasses
import io

import matplotlib.image
import pytest

from megatron_rl.errors import Violation
from megatron_rl.trials.ablation_file import AblationConfig
from megatron_rl.trials.ablation_picture import draw_ablation
from megatron_rl.trials.ablation_report import as_csv, as_markdown, broken_rules, dry_run_table, rule_lines
from megatron_rl.trials.points import Expected, GroupSizes, PlannedPoint, Point
from megatron_rl.trials.record import Record
from megatron_rl.trials.result import ResultRow, result_of, rows_of
from megatron_rl.trials.trial_outcome import TrialOutcome

ABLATION = AblationConfig("base.yaml", baseline="a", warmup_steps=1)


def step(seconds: float, memory: float = 0.5) -> dict[str, float]:
    """Of 4 ranks: 100 tokens; half of the time is the update of both roles, a fifth generation, a tenth the rest."""
    parts = {"gen": 0.2, "old_log_prob": 0.05, "ref": 0.05, "values": 0.05, "reshard": 0.05, "adv": 0.1}
    parts |= {"update_critic": 0.3, "update_actor": 0.2}
    return {
        **{f"timing_s/{name}": share * seconds for name, share in parts.items()},
        "timing_s/step": seconds,
        "perf/throughput": 100 / seconds / 4,
        "reshard/exchange_s": 0.004,
        "perf/memory_gb/update_actor": memory,
        "perf/memory_gb/generation": memory / 2,
        "perf/memory_planned_gb/update_actor": 0.4,
        "critic/score/mean": seconds / 10,
    }


def planned(name: str, layout: GroupSizes | None = None, **violated) -> PlannedPoint:
    point = Point(name, f"key of {name}", {}, {})
    if layout is None:
        return PlannedPoint(point, "", [Violation(violated, "must be less", {"x": 1})])
    return PlannedPoint(point, "", [], layout, Expected(0.5, 8 * 10**8, 3_000_000, True))


def record(name: str, *seconds: float, **changes) -> Record:
    steps = {number: step(value) for number, value in enumerate(seconds, start=1)}
    sizes = {"received_bytes": [2_000_000, 3_000_000], "bound_bytes": [2_000_000, 3_000_000]}
    return Record(name, f"key of {name}", TrialOutcome.FINISHED, seconds=20.0, steps=steps, **(sizes | changes))


PLANNED = [
    planned("a", GroupSizes(2, 2, 1, 2)),
    planned("b", GroupSizes(1, 1, 4, 1)),
    planned("c", GroupSizes(4, 1, 1, 4)),
    planned("d", GroupSizes(1, 2, 2, 1)),
    planned("e", x=9),
]
RECORDS = {
    "a": record("a", 9.0, 2.0, 4.0, 3.0),
    "b": record("b", 9.0, 1.5, 1.5),
    "c": dataclasses.replace(
        record("c"), outcome=TrialOutcome.CRASHED, reason="exit code 3: bang", tail=["first", "bang"]
    ),
}
ROWS = rows_of(PLANNED, RECORDS, warmup_steps=1)


def test_numbers_of_one_run():
    """By hand, over steps of 2, 4 and 3 s; the first of 9 s is a warm-up and only its reward counts."""
    result = result_of(RECORDS["a"], num_ranks=4, warmup_steps=1)
    assert result.num_steps == 3 and result.step_s == (3.0, 2.0, 4.0)
    phases = {"gen": 0.6, "log-probs": 0.45, "update": 1.5, "reshard": 0.15, "rest": 0.3}
    assert result.phases_s == pytest.approx(phases)
    assert result.tokens_per_s == pytest.approx(100 / 3) and result.tokens_per_s_per_rank == pytest.approx(100 / 12)
    assert (result.received_bytes, result.bound_bytes) == (3_000_000, 3_000_000)
    assert (result.memory_bytes, result.planned_memory_bytes) == (0.5e9, 0.4e9)
    assert result.scores == (0.9, 0.2, 0.4, 0.3)


def test_ratios_to_the_baseline():
    """By hand: 1.5 s instead of 3 s, so twice the tokens. Would not catch a baseline that is the wrong point."""

    def ratios(baseline: str | None, row: int) -> list[str]:
        line = list(csv.DictReader(io.StringIO(as_csv(ROWS, baseline))))[row]
        return [line[f"{name}_ratio"] for name in ("step_s", "tokens_per_s_per_rank", "memory")]

    assert ratios("a", 1) == ["0.5", "2", "1"]
    assert ratios(None, 1) == ratios("c", 1) == ratios("a", 2) == ["", "", ""]
    assert ROWS[0].measured_over_planned == pytest.approx(6.0) and ROWS[3].measured_over_planned is None


def test_rows_follow_points_and_not_files():
    """A record of another configuration counts as none. Would not catch a change that leaves the key as it is."""
    outcomes = [
        TrialOutcome.FINISHED,
        TrialOutcome.FINISHED,
        TrialOutcome.CRASHED,
        TrialOutcome.NOT_RUN,
        TrialOutcome.INVALID,
    ]
    assert [row.outcome for row in ROWS] == outcomes
    stale = RECORDS | {"a": dataclasses.replace(RECORDS["a"], key="of before")}
    assert rows_of(PLANNED, stale, 1)[0] == ResultRow(PLANNED[0], TrialOutcome.NOT_RUN)


def test_csv_has_every_point():
    """In the file's order, an empty cell where there is no number. Would not catch a column that is missing."""
    lines = list(csv.DictReader(io.StringIO(as_csv(ROWS, "a"))))
    assert [line["name"] for line in lines] == list("abcde")
    assert [line["step_s_ratio"] for line in lines] == ["1", "0.5", "", "", ""]
    assert [line["outcome"] for line in lines] == ["finished", "finished", "crashed", "not run", "invalid"]
    assert lines[1]["dp"] == "4" and lines[4]["dp"] == "" and "x=9 must be less" in lines[4]["reason"]
    assert lines[0]["log_probs_s"] == "0.45" and lines[0]["measured_over_planned_step_s"] == "6"


def test_markdown_says_what_finished_first_and_why_others_did_not():
    """The fastest at the top. By hand: rewards are furthest apart in step 3, 0.4 and 0.15.

    Would not catch a number in the wrong column, but for these.
    """
    text = as_markdown(ROWS, ABLATION, "ablation.png")
    assert text.startswith("# Ablation of base.yaml\n")
    assert "do not count. Rewards of the same step differ between points by at most 0.25." in text
    assert "5 points: 2 finished, 1 invalid, 1 crashed, 1 not run. Ratios are to a." in text
    results = [line for line in text.splitlines() if line.startswith(("| TP", "| **TP"))]
    arrow = "\N{RIGHTWARDS ARROW}"
    assert results[0].startswith(f"| TP1 PP1 DP4 {arrow} TP1 | 1.50 (1.50 to 1.50) | 0.50 | 0.30 |")
    assert results[1] == (
        f"| **TP2 PP2 DP1 {arrow} TP2** (baseline) | 3.00 (2.00 to 4.00) | 1.00 | 0.60 | 0.45 | 1.50 | 0.15 | 0.30 "
        "| 33 | 8 | 1.00 | 3.000 / 3.000 | 4.0 | 500.0 / 400.0 | 1.00 | 0.50 | 6.0 | 0.4500 |"
    )
    assert f"| TP4 PP1 DP1 {arrow} TP4 | crashed | 20 | exit code 3: bang |" in text
    assert "```\nfirst\nbang\n```" in text
    assert "| e | x=9 must be less; try: 1 |" in text


def test_a_report_without_baseline_says_so():
    """No ratios, and the reason; nothing has finished at all. Would not catch a half-written record."""
    rows = rows_of(PLANNED, {name: RECORDS[name] for name in "bc"}, 1)
    text = as_markdown(rows, ABLATION, None)
    assert "The baseline a has no result (not run), so there are no ratios." in text
    assert "| 1.50 (1.50 to 1.50) |  | 0.30 |" in text
    nothing = as_markdown(rows_of(PLANNED, {}, 1), dataclasses.replace(ABLATION, baseline=None), None)
    assert "No point is the baseline" in nothing and "Medians" not in nothing


def test_picture_grows_with_the_points(tmp_path):
    """Failures have a line, invalid points none; nothing is drawn of nothing. Would not catch an ugly one."""
    few, more = tmp_path / "few.png", tmp_path / "more.png"
    assert draw_ablation(ROWS[:1], "a", few) and draw_ablation(ROWS, "a", more)
    heights = [matplotlib.image.imread(file).shape[0] for file in (few, more)]
    assert heights[1] - heights[0] == pytest.approx(2 * 0.42 * 130, abs=2)
    assert not draw_ablation(ROWS[2:], "a", tmp_path / "none.png") and not (tmp_path / "none.png").exists()


def test_a_broken_rule_is_one_sentence_for_all_points():
    """Five points, three values, two rules: two sentences. Would not catch rules that differ in words alone."""
    even, odd = "must divide the 4 ranks", "must be odd"
    broken = [(f"tp{size}-{seed}", size) for size in (3, 5) for seed in (1, 2)] + [("tp7-1", 7)]
    points = [planned(name, tp=size) for name, size in broken]
    points = [
        dataclasses.replace(one, violations=[dataclasses.replace(one.violations[0], rule=even)]) for one in points
    ]
    points[-1].violations.append(Violation({"tp": 7}, odd))
    assert broken_rules(points) == [
        ("tp3-1, tp3-2, tp5-1, tp5-2 and 1 more", "tp=3 and tp=5 and tp=7 must divide the 4 ranks; try: x=1"),
        ("tp7-1", "tp=7 must be odd"),
    ]


def test_dry_run_lists_both_kinds():
    """Would not catch a wrong number, which the planner's own tests do."""
    valid, lines = dry_run_table(ROWS), rule_lines([row.planned for row in ROWS])
    assert valid.row_count == 4 and len(lines) == 2 and lines[0] == "1 points cannot run, by these rules:"
    assert list(valid.columns[3].cells) == ["0.80 GB"] * 4 and list(valid.columns[5].cells)[2] == "crashed"
