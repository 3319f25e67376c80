"""The nightly gate: one trial that is stopped in the middle and resumes, judged against golden metrics.

Its report is one page of markdown, its verdict the exit code of `megatron-rl nightly`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.storage import writing
from megatron_rl.config.file_kinds import read_whole
from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.observe.appended_file import replace_file
from megatron_rl.observe.summary import markdown_block, markdown_table
from megatron_rl.trials.golden import Comparison, Golden
from megatron_rl.trials.trial import OUTPUT, RUN, TimeLimits, Trial, require_own
from megatron_rl.trials.trial_outcome import Attempt, TrialOutcome, outcome_of

REPORT, TITLE = "report.md", "# Nightly: "
"""The report's file, and the beginning of its first line."""
LONGEST_REPORT = 64 << 20
NUM_TAIL_LINES = 30


class Verdict(Enum):
    """The name, and the exit code of `megatron-rl nightly`."""

    PASS = 0
    INVALID_CONFIG = ConfigError.exit_code
    REGRESSION = 10
    CRASH = 11
    HANG = 12


FAILURES = {TrialOutcome.TIMED_OUT: Verdict.HANG, TrialOutcome.INVALID: Verdict.INVALID_CONFIG}
"""Every other outcome than FINISHED is a crash, and so is an interrupted trial, which did not resume."""


@dataclass(frozen=True)
class Night:
    """What a nightly came to. attempts: its lives, one after the other."""

    verdict: Verdict
    attempts: Sequence[Attempt]
    comparisons: Sequence[Comparison]

    def as_json(self) -> dict[str, Any]:
        """The content of the report as data; seconds."""
        return {
            "verdict": self.verdict.name.lower(),
            "exit_code": self.verdict.value,
            "lives": [{"seconds": one.seconds, "last_step": one.last_step, "end": _end(one)} for one in self.attempts],
            "comparisons": [asdict(one) | {"passed": one.passed} for one in self.comparisons],
        }


@contextmanager
def reported(folder: Path, command: str) -> Iterator[None]:
    """Replace the folder's report of another night before anything else happens, and again where this one fails.

    Until `run_nightly` has a verdict, the report says that the night has not ended. Raises ConfigError if the folder
    has other files in it, StorageError.
    """
    require_own(folder, is_nightly, "nightly")
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    _write(folder, title("not ended", None), command, f"It began at {began}. It is at work, or it was killed.")
    try:
        yield
    except MegatronRLError as error:
        name = "invalid config" if isinstance(error, ConfigError) else type(error).__name__
        _write_again(folder, title(name, error.exit_code), command, str(error))
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        code = end.code if isinstance(end, SystemExit) and isinstance(end.code, int) else 130
        _write_again(folder, title("interrupted", code), command, f"A signal ended it; it began at {began}.")
        raise
    except BaseException as error:
        _write_again(folder, title("crash", 1), command, f"A fault of this program: {error!r}; the log has its place.")
        raise


def is_nightly(folder: Path) -> bool:
    """Whether what is in a folder is a nightly's: it has a report, or nothing but a run and its output."""
    with suppress(OSError):
        return read_whole(folder / REPORT, LONGEST_REPORT).startswith(TITLE.encode())
    return {thing.name for thing in folder.iterdir()} <= {OUTPUT, RUN}


def title(outcome: str, code: int | None) -> str:
    """Return the first line of a report. code: the command's exit code; None: it has none yet."""
    return f"{TITLE}{outcome}{'' if code is None else f' (exit code {code})'}"


def _write(folder: Path, first: str, command: str, text: str) -> None:
    with writing():
        folder.mkdir(parents=True, exist_ok=True)
        _replace_report(folder, f"{first}\n\n    {command}\n\n{text}\n")


def _replace_report(folder: Path, text: str) -> None:
    """Write the report; a link in its place leads nowhere, and a pipe holds nobody up. Raises OSError."""
    replace_file(folder / REPORT, text.encode(errors="backslashreplace"))


def _write_again(folder: Path, first: str, command: str, text: str) -> None:
    with suppress(MegatronRLError):  # the error that is being raised says more
        _write(folder, first, command, text)


def nightly_trial(golden: Golden, config: Path, folder: Path, overrides: Sequence[str]) -> Trial:
    """The trial, in a folder of `reported`, which is emptied but for the report. Raises StorageError."""
    save = "trainer.save_freq=1000000"  # a run that never saves is not saved when it is stopped, either
    trial = Trial(config, folder.resolve(), (save, *overrides, f"trainer.total_training_steps={golden.steps}"))
    with writing():
        not_ended = (folder / REPORT).read_text()
        trial.empty()
        _replace_report(folder, not_ended)
    return trial


def run_nightly(trial: Trial, golden: Golden, command: str) -> Night:
    """Run the trial to its end and write the report. command: the nightly's command line, for the report.

    The first attempt is stopped after `golden.stop_after_step`. If it saves and ends, a second one runs to the end.
    """
    limits = TimeLimits(first_step_s=golden.first_step_within_s, step_s=golden.step_within_s)
    attempts = [trial.run_once(limits, golden.stop_after_step)]
    if attempts[0].outcome is TrialOutcome.INTERRUPTED:
        attempts.append(trial.run_once(limits))
    comparisons = golden.compare(trial.recorded())
    verdict = verdict_of(attempts, comparisons)
    with writing():
        _replace_report(trial.folder, report(verdict, command, attempts, comparisons))
    return Night(verdict, attempts, comparisons)


def verdict_of(attempts: Sequence[Attempt], comparisons: Sequence[Comparison]) -> Verdict:
    """The end of the trial decides first: a trial that failed has no metrics to compare."""
    outcome = outcome_of(attempts)
    if outcome is not TrialOutcome.FINISHED:
        return FAILURES.get(outcome, Verdict.CRASH)
    return Verdict.PASS if all(comparison.passed for comparison in comparisons) else Verdict.REGRESSION


def report(verdict: Verdict, command: str, attempts: Sequence[Attempt], comparisons: Sequence[Comparison]) -> str:
    """The report. Unless the verdict is a pass, it has the end of the last attempt's output."""
    failed = [comparison for comparison in comparisons if not comparison.passed]
    passed = [comparison for comparison in comparisons if comparison.passed]
    ends = [
        (number, f"{attempt.seconds:.0f}", attempt.last_step, _end(attempt))
        for number, attempt in enumerate(attempts, start=1)
    ]
    lines = [title(verdict.name.lower().replace("_", " "), verdict.value), "", f"    {command}", ""]
    lines += [*markdown_table(("life", "seconds", "last step", "end"), ends), ""]
    lines += [f"{len(passed)} of {len(comparisons)} comparisons with the golden file passed.", ""]
    lines += markdown_table(("metric", "step", "found", "golden", "band", ""), map(_compared, [*failed, *passed]))
    if verdict is not Verdict.PASS and attempts:
        lines += ["", *markdown_block("The end of the last life's output:", attempts[-1].tail(NUM_TAIL_LINES))]
    return "\n".join(lines) + "\n"


def _end(attempt: Attempt) -> str:
    if attempt.overran_s is not None:
        return f"killed after {attempt.overran_s:.0f} s without a step"
    return f"{'SIGTERM, then ' if attempt.to_stop else ''}{attempt.ending}"


def _compared(comparison: Comparison) -> tuple[object, ...]:
    step = "median" if comparison.step is None else comparison.step
    found = "none" if comparison.found is None else f"{comparison.found:.6g}"
    band = f"{comparison.low:.6g} to {comparison.high:.6g}"
    return comparison.metric, step, found, f"{comparison.golden:.6g}", band, "" if comparison.passed else "**out**"
