"""The nightly gate: one trial that is stopped in the middle and goes on, judged against golden metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.checkpoint.storage import writing
from megatron_rl.trials.golden import Golden
from megatron_rl.trials.trial import OUTPUT, Patience, Trial, require_own
from megatron_rl.trials.trial_outcome import Life, TrialOutcome
from megatron_rl.trials.verdict import Verdict, report, verdict_of

REPORT = "report.md"


def nightly_trial(golden: Golden, config: Path, folder: Path, overrides: Sequence[str]) -> Trial:
    """The trial in a folder that is empty then. Raises ConfigError where something else is in it, StorageError."""
    require_own(folder, OUTPUT, "nightly")
    save = "trainer.save_freq=1000000"  # a run that never saves is not saved when it is stopped, either
    trial = Trial(config, folder, (save, *overrides, f"trainer.total_training_steps={golden.steps}"))
    with writing():
        trial.empty()
    return trial


def run_nightly(trial: Trial, golden: Golden, command: str) -> Verdict:
    """Run it to its end and write the report. command: how the nightly was started, for the report."""
    lives = run_lives(trial, golden)
    comparisons = golden.compare(trial.recorded())
    verdict = verdict_of(lives, comparisons)
    with writing():
        (trial.folder / REPORT).write_text(report(verdict, command, lives, comparisons))
    return verdict


def run_lives(trial: Trial, golden: Golden) -> list[Life]:
    """One life that is stopped after `golden.stop_after_step`, and, where it stops as it is told, one to the end."""
    patience = Patience(first_step_s=golden.first_step_within_s, step_s=golden.step_within_s)
    lives = [trial.live(patience, golden.stop_after_step)]
    if lives[0].outcome is TrialOutcome.INTERRUPTED:
        lives.append(trial.live(patience))
    return lives
