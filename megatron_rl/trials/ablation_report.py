"""The report of an ablation: csv with every number, markdown for people, tables of a dry run. Pure."""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from megatron_rl.errors import Violation, shown
from megatron_rl.observe.summary import markdown_block, markdown_table, plain_table
from megatron_rl.planning.memory_report import amount
from megatron_rl.trials.ablation_file import AblationConfig
from megatron_rl.trials.points import PlannedPoint
from megatron_rl.trials.result import PHASES, REST, Result, ResultRow, by_step_time, memory_unit
from megatron_rl.trials.trial_outcome import TrialOutcome

CSV_PHASES = {phase: f"{phase.replace('-', '_')}_s" for phase in (*PHASES, REST)}
"""Phase -> its column in ablation.csv."""
SHOWN_POINTS = 4
"""Points that a broken rule names."""
LEAST_RANKED = 3
"""An order of fewer points says nothing."""
LEGEND = """\
- step s: median, smallest to largest of the steps that count; the five columns after it are medians, too, so they need
  not add up to it exactly. log-probs: of policy and reference, and values; update: critic and actor; reshard: to
  rollout mode and back.
- tokens/s: of prompts and responses, all ranks together, and of one rank.
- received: by the rank that receives most in one resharding to rollout mode, and the least that is possible.
  exchange: the part of reshard in which these bytes travel.
- memory: of the worst rank in its worst phase; planned: for the same tensors. On CPU ranks these are the tensors that
  are kept, as no allocator counts the rest; on GPUs the allocator's peak.
- planned step s: the planner's estimate, and how many times as long the measured step took. Small models are dominated
  by overheads that only a hardware file of `megatron-rl profile` contains: without one it means little on CPU ranks.
- reward: mean of all steps, the first ones too. Samples do not depend on the layout, so where points differ in layout
  alone, rewards differ by rounding alone.
- x: over the baseline's."""


def as_csv(rows: Sequence[ResultRow], baseline: str | None) -> str:
    """One line for each point, in the order of the ablation's file; an empty cell for a missing number."""
    text = io.StringIO()
    lines = [_numbers(row, rows, baseline) for row in rows]
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in line.items()} for line in lines)
    return text.getvalue()


def as_markdown(rows: Sequence[ResultRow], ablation: AblationConfig, picture: str | None) -> str:
    """Finished points, the fastest first; then unfinished points with their reasons; then points that cannot run.

    picture: the name of the picture's file; None: the report has none.
    """
    finished = by_step_time(rows)
    counts = ", ".join(f"{count} {outcome}" for outcome in TrialOutcome if (count := _count(rows, outcome)))
    lines = [f"# Ablation of {ablation.config}", "", f"{len(rows)} points: {counts}. {_baseline_text(rows, ablation)}"]
    if finished:
        apart = largest_difference([row.result.scores for row in finished if row.result is not None])
        steps = sorted({row.result.num_steps for row in finished if row.result is not None})
        span = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        lines += ["", f"Medians over {span} steps; {ablation.warmup_steps} before them do not count.", ""]
        if apart is not None:
            lines[-2] += f" Rewards of the same step differ between points by at most {apart:.3g}."
        lines += [*([f"![seconds by phase, tokens per second, bytes, memory]({picture})", ""] if picture else [])]
        lines += [*_results_table(finished, rows, ablation.baseline), "", LEGEND]
        lines += ranking_lines(rows, ablation.chosen)
    other = [row for row in rows if row.outcome not in (TrialOutcome.FINISHED, TrialOutcome.INVALID)]
    if other:
        cells = [(row.planned.label, row.outcome, _formatted(row.seconds, "{:.0f}"), row.reason) for row in other]
        lines += ["", "## Not finished", "", *markdown_table(("point", "outcome", "seconds", "reason"), cells)]
        for row in other:
            if row.tail and row.outcome is not TrialOutcome.INTERRUPTED:
                lines += ["", *markdown_block(f"The end of what {row.name} printed:", row.tail)]
    invalid = [row for row in rows if row.outcome is TrialOutcome.INVALID]
    if invalid:
        names: dict[str, list[str]] = {}
        for row in invalid:
            names.setdefault(row.reason, []).append(row.name)
        rules = [(", ".join(points), reason) for reason, points in names.items()]
        lines += ["", "## Invalid", "", *markdown_table(("points", "rule"), rules)]
    return "\n".join(lines) + "\n"


def largest_difference(scores: Sequence[Sequence[float]]) -> float | None:
    """The largest difference between two runs in one step, over the steps that all runs have; None for fewer than two
    runs, and without steps.
    """
    if len(scores) < 2:
        return None
    return max((max(step) - min(step) for step in zip(*scores, strict=False)), default=None)


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's tau-b: pairs in the same order less pairs in the opposite order, over the pairs that are not tied; 0 if
    all of either are equal (Kendall, Biometrika 33, 1945).
    """
    agreeing = tied_predicted = tied_measured = pairs = 0
    for (a, b), (c, d) in itertools.combinations(zip(predicted, measured, strict=True), 2):
        first, second = _sign(a - c), _sign(b - d)
        agreeing += first * second
        tied_predicted += first == 0
        tied_measured += second == 0
        pairs += 1
    size = (pairs - tied_predicted) * (pairs - tied_measured)
    return agreeing / math.sqrt(size) if size else 0.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Predicted over measured seconds, less 1: below 0 where the prediction is too fast."""
    return [guess / seconds - 1 for guess, seconds in zip(predicted, measured, strict=True)]


def ranking_lines(rows: Sequence[ResultRow], chosen: str | None = None) -> list[str]:
    """A section of the report on the points that finished; empty if they are fewer than `LEAST_RANKED`.

    chosen: the name of a point, such as the one that `map` offered; None: the point predicted to be the fastest. The
    regret says how much longer the chosen point takes than the best, as a share.
    """
    steps = {
        row.name: (row.planned.expected.step_s, row.result.step_s[0])
        for row in rows
        if row.result is not None and row.planned.expected is not None
    }
    if len(steps) < LEAST_RANKED:
        return []
    predicted, measured = zip(*steps.values(), strict=True)
    errors = [abs(error) for error in relative_errors(predicted, measured)]
    choice = chosen if chosen in steps else min(steps, key=lambda name: steps[name][0])
    best = min(steps, key=lambda name: steps[name][1])
    chosen_s, best_s = steps[choice][1], steps[best][1]
    facts = [
        ("points", len(steps)),
        ("Kendall's tau", f"{kendall_tau(predicted, measured):.2f}"),
        ("median error", f"{statistics.median(errors):.0%}"),
        ("largest error", f"{max(errors):.0%}"),
        (f"chosen: {choice}", f"{chosen_s:.3g} s"),
        (f"best: {best}", f"{best_s:.3g} s"),
        ("regret", f"{chosen_s / best_s - 1:.0%}"),
    ]
    return ["", "## Predicted against measured", "", *markdown_table(("what", "value"), facts, rule="---:")]


def dry_run_table(rows: Sequence[ResultRow]) -> Table:
    """The points that can run, with the planner's numbers."""
    valid = [row for row in rows if row.planned.expected is not None]
    planned = [
        (
            row.name,
            row.planned.label,
            f"{row.planned.expected.step_s:.3g} s",
            amount(row.planned.expected.peak_bytes) + ("" if row.planned.expected.fits else ", does not fit"),
            amount(row.planned.expected.received_bytes),
            row.outcome,
        )
        for row in valid
        if row.planned.expected is not None
    ]
    headings = ("point", "layout", "step", "memory", "received", "so far")
    return plain_table(f"{len(valid)} points can run; planned, of the worst rank", headings, planned)


def rule_lines(planned: Sequence[PlannedPoint]) -> list[str]:
    """Return the lines on points that cannot run: each rule that they break."""
    invalid = [one for one in planned if one.violations]
    if not invalid:
        return []
    rules = [f"  {names}: {sentence}" for names, sentence in broken_rules(invalid)]
    return [f"{len(invalid)} points cannot run, by these rules:", *rules]


def broken_rules(planned: Sequence[PlannedPoint]) -> list[tuple[str, str]]:
    """Return (points that break it, sentence) of each broken rule, once however many points and values break it."""
    broken: dict[tuple[str, tuple[str, ...]], list[tuple[str, Violation]]] = {}
    for one in planned:
        for violation in one.violations:
            key = (violation.rule, tuple(violation.settings))
            broken.setdefault(key, []).append((one.point.name, violation))
    rows = []
    for found in broken.values():
        names = list(dict.fromkeys(name for name, _ in found))
        subjects = dict.fromkeys(subject_of(violation) for _, violation in found)
        more = f" and {len(names) - SHOWN_POINTS} more" if len(names) > SHOWN_POINTS else ""
        sentence = replace(found[0][1], subject=" and ".join(subjects))
        rows.append((", ".join(names[:SHOWN_POINTS]) + more, str(sentence)))
    return rows


def subject_of(violation: Violation) -> str:
    """Return what breaks a rule, as its sentence begins."""
    return violation.subject or " and ".join(f"{key}={shown(value)}" for key, value in violation.settings.items())


def _results_table(finished: Sequence[ResultRow], rows: Sequence[ResultRow], baseline: str | None) -> list[str]:
    unit, name = memory_unit(finished)
    headings = ["layout", "step s", "x", *CSV_PHASES, "tokens/s", "per rank", "x"]
    headings += [f"received / least {name}", "exchange ms", f"memory / planned {name}", "x"]
    headings += ["planned step s", "measured / planned", "reward"]
    return markdown_table(headings, [_cells(row, rows, baseline, unit) for row in finished], rule="---:")


def _cells(row: ResultRow, rows: Sequence[ResultRow], baseline: str | None, unit: float) -> list[str]:
    """The cells of a finished point in the markdown table. unit: bytes."""
    number = _numbers(row, rows, baseline)
    label = f"**{row.planned.label}** (baseline)" if row.name == baseline else row.planned.label
    return [
        label,
        f"{number['step_s']:.2f} ({number['step_s_min']:.2f} to {number['step_s_max']:.2f})",
        _formatted(number["step_s_ratio"], "{:.2f}"),
        *(f"{number[name]:.2f}" for name in CSV_PHASES.values()),
        f"{number['tokens_per_s']:.0f}",
        f"{number['tokens_per_s_per_rank']:.0f}",
        _formatted(number["tokens_per_s_per_rank_ratio"], "{:.2f}"),
        f"{number['received_bytes'] / unit:.3f} / {number['least_received_bytes'] / unit:.3f}",
        f"{number['exchange_s'] * 1e3:.1f}",
        f"{number['memory_bytes'] / unit:.1f} / {number['planned_memory_bytes'] / unit:.1f}",
        _formatted(number["memory_ratio"], "{:.2f}"),
        f"{number['planned_step_s']:.2f}",
        _formatted(number["measured_over_planned_step_s"], "{:.1f}"),
        f"{number['mean_reward']:.4f}",
    ]


def _numbers(row: ResultRow, rows: Sequence[ResultRow], baseline: str | None) -> dict[str, Any]:
    """Column of ablation.csv -> its value for one point; None for a missing number. Ratios are over the baseline's."""
    planned, result = row.planned, row.result
    base = next((other.result for other in rows if other.name == baseline), None)
    step_s = (None, None, None) if result is None else result.step_s

    def ratio(number: Callable[[Result], float]) -> float | None:
        return None if result is None or base is None else number(result) / number(base)

    def known(owner: object, name: str) -> Any:
        return None if owner is None else getattr(owner, name)

    return {
        "name": row.name,
        **{name: known(planned.layout, name) for name in ("tp", "pp", "dp", "rollout_tp")},
        "options": planned.options,
        "baseline": int(row.name == baseline),
        "outcome": row.outcome,
        "reason": row.reason,
        "run_s": row.seconds,
        "steps": known(result, "num_steps"),
        "step_s": step_s[0],
        "step_s_min": step_s[1],
        "step_s_max": step_s[2],
        "step_s_ratio": ratio(lambda own: own.step_s[0]),
        **{name: result and result.phases_s[phase] for phase, name in CSV_PHASES.items()},
        "tokens_per_s": known(result, "tokens_per_s"),
        "tokens_per_s_per_rank": known(result, "tokens_per_s_per_rank"),
        "tokens_per_s_per_rank_ratio": ratio(lambda own: own.tokens_per_s_per_rank),
        "received_bytes": known(result, "received_bytes"),
        "least_received_bytes": known(result, "bound_bytes"),
        "planned_received_bytes": known(planned.expected, "received_bytes"),
        "exchange_s": known(result, "exchange_s"),
        "memory_bytes": known(result, "memory_bytes"),
        "planned_memory_bytes": known(result, "planned_memory_bytes"),
        "memory_ratio": ratio(lambda own: own.memory_bytes),
        "planned_peak_bytes": known(planned.expected, "peak_bytes"),
        "planned_step_s": known(planned.expected, "step_s"),
        "measured_over_planned_step_s": row.measured_over_planned,
        "mean_reward": result and statistics.mean(result.scores),
        "rewards": result and " ".join(f"{score:.6g}" for score in result.scores),
    }


def _baseline_text(rows: Sequence[ResultRow], ablation: AblationConfig) -> str:
    if ablation.baseline is None:
        return "No point is the baseline, so there are no ratios."
    base = next(row for row in rows if row.name == ablation.baseline)
    if base.result is None:
        return f"The baseline {base.name} has no result ({base.outcome}), so there are no ratios."
    return f"Ratios are to {base.name}."


def _count(rows: Sequence[ResultRow], outcome: TrialOutcome) -> int:
    return sum(row.outcome is outcome for row in rows)


def _formatted(value: float | None, form: str) -> str:
    """An empty cell for a missing number."""
    return "" if value is None else form.format(value)


def _plain(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value.replace("\n", " ") if isinstance(value, str) else value
