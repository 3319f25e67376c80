"""The one-page report of a nightly run, in markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.trials.golden import Check
from megatron_rl.trials.verdict import Life, Outcome

MAX_OUTPUT_LINES = 30


def markdown(outcome: Outcome, command: str, lives: Sequence[Life], checks: Sequence[Check], output: str) -> str:
    """`output`: what the last life printed; its end is shown where the outcome is no pass."""
    failed = [check for check in checks if not check.passed]
    lines = [
        f"# Nightly: {outcome.name.lower().replace('_', ' ')} (exit code {outcome.value})",
        "",
        f"    {command}",
        "",
        "| life | seconds | last step | end |",
        "|---|---|---|---|",
        *(f"| {index} | {life.seconds:.0f} | {life.last_step} | {_end(life)} |" for index, life in enumerate(lives, 1)),
        "",
        f"{len(checks) - len(failed)} of {len(checks)} comparisons with the golden file passed.",
        "",
        "| metric | step | found | golden | band | |",
        "|---|---|---|---|---|---|",
        *(_row(check) for check in [*failed, *(check for check in checks if check.passed)]),
    ]
    if outcome is not Outcome.PASS:
        lines += ["", "The end of the last life's output:", "", "```", *output.splitlines()[-MAX_OUTPUT_LINES:], "```"]
    return "\n".join(lines) + "\n"


def _end(life: Life) -> str:
    if life.hung_after_s is not None:
        return f"killed after {life.hung_after_s:.0f} s without a step"
    stop = "SIGTERM, then " if life.to_stop else ""
    return f"{stop}exit code {life.exit_code}"


def _row(check: Check) -> str:
    step = "median" if check.step is None else check.step
    found = "none" if check.found is None else f"{check.found:.6g}"
    verdict = "" if check.passed else "**out**"
    return (
        f"| {check.metric} | {step} | {found} | {check.golden:.6g} | {check.low:.6g} to {check.high:.6g} | {verdict} |"
    )
