"""What a nightly run comes to: one verdict, one exit code, and the one-page report, in markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from megatron_rl.errors import ConfigError
from megatron_rl.trials.golden import Comparison
from megatron_rl.trials.markdown import block, row, table
from megatron_rl.trials.trial_outcome import Life, TrialOutcome, outcome_of

NUM_TAIL_LINES = 30


class Verdict(Enum):
    """Name, and the exit code of `megatron-rl nightly`."""

    PASS = 0
    INVALID_CONFIG = ConfigError.exit_code
    REGRESSION = 10
    CRASH = 11
    HANG = 12


ILL = {TrialOutcome.TIMED_OUT: Verdict.HANG, TrialOutcome.INVALID: Verdict.INVALID_CONFIG}
"""All other outcomes than FINISHED are a crash; an interrupted trial, too: it never went on."""


def verdict_of(lives: Sequence[Life], comparisons: Sequence[Comparison]) -> Verdict:
    """How the trial ended comes first: what ended badly has no metrics to compare."""
    outcome = outcome_of(lives)
    if outcome is not TrialOutcome.FINISHED:
        return ILL.get(outcome, Verdict.CRASH)
    return Verdict.PASS if all(comparison.passed for comparison in comparisons) else Verdict.REGRESSION


def report(verdict: Verdict, command: str, lives: Sequence[Life], comparisons: Sequence[Comparison]) -> str:
    """The end of the last life's output is shown where the verdict is no pass."""
    failed = [comparison for comparison in comparisons if not comparison.passed]
    passed = [comparison for comparison in comparisons if comparison.passed]
    title = f"# Nightly: {verdict.name.lower().replace('_', ' ')} (exit code {verdict.value})"
    lines = [title, "", f"    {command}", ""]
    ends = [row(number, f"{life.seconds:.0f}", life.last_step, _end(life)) for number, life in enumerate(lives, 1)]
    lines += [*table("life", "seconds", "last step", "end"), *ends, ""]
    lines += [f"{len(passed)} of {len(comparisons)} comparisons with the golden file passed.", ""]
    lines += [*table("metric", "step", "found", "golden", "band", ""), *map(_compared, [*failed, *passed])]
    if verdict is not Verdict.PASS and lives:
        lines += ["", *block("The end of the last life's output:", lives[-1].tail(NUM_TAIL_LINES))]
    return "\n".join(lines) + "\n"


def _end(life: Life) -> str:
    if life.overran_s is not None:
        return f"killed after {life.overran_s:.0f} s without a step"
    return f"{'SIGTERM, then ' if life.to_stop else ''}{life.ending}"


def _compared(one: Comparison) -> str:
    step = "median" if one.step is None else one.step
    found = "none" if one.found is None else f"{one.found:.6g}"
    band = f"{one.low:.6g} to {one.high:.6g}"
    return row(one.metric, step, found, f"{one.golden:.6g}", band, "" if one.passed else "**out**")
