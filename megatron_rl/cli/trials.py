"""megatron-rl ablate | nightly: several runs, and a verdict on them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.checkpoint.storage import writing
from megatron_rl.cli.options import AsJson, ConfigPath, Overrides
from megatron_rl.cli.output import check_output_file, check_output_folder, print_json, say
from megatron_rl.cluster.signals import exit_on_signals
from megatron_rl.config.problems import raise_problems
from megatron_rl.errors import ConfigError, Violation
from megatron_rl.observe.terminal import Terminal
from megatron_rl.planning.checked_config import checked, only_ppo
from megatron_rl.trials.ablation import Ablation, only_ablation
from megatron_rl.trials.ablation_file import read_ablation
from megatron_rl.trials.ablation_report import broken_rules, dry_run_table, rule_lines
from megatron_rl.trials.golden import read_golden, write_golden
from megatron_rl.trials.nightly import REPORT, Verdict, nightly_trial, reported, run_nightly
from megatron_rl.trials.points import plan_points
from megatron_rl.trials.trial_outcome import FAILED, TrialOutcome

SOME_POINTS_FAILED = 11
"""Exit code of an ablation some of whose valid points have no result."""


def nightly_command(
    config: ConfigPath,
    overrides: Overrides = None,
    golden: Annotated[Path, typer.Option(help="Golden metrics and their bands.")] = Path("configs/nightly_golden.json"),
    folder: Annotated[Path, typer.Option(help="Emptied first where it is a nightly's own.")] = Path("outputs/nightly"),
    renew: Annotated[bool, typer.Option("--renew", help="Write the results of this run into the golden file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train, stop in the middle, resume, and compare metrics with recorded ones; writes FOLDER/report.md.

    Exit codes: 0 pass, 2 invalid configuration, 10 regression, 11 crash, 12 hang.
    """
    check_output_folder("--folder", folder)
    exit_on_signals()  # so that training ends, too
    command = shlex.join(["megatron-rl", *sys.argv[1:]])
    try:
        with reported(folder, command):
            if renew:
                check_output_file("--golden", golden)
            bands = read_golden(golden)
            run = checked(config, overrides, change=lambda found: only_ppo(found, "nightly"))
            raise_problems("this run cannot start", run.violations)
            trial = nightly_trial(bands, config, folder, overrides or ())
            night = run_nightly(trial, bands, command)
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"verdict": "invalid_config", "exit_code": error.exit_code, "error": str(error)})
        raise typer.Exit(error.exit_code) from error
    is_renewed = renew and night.verdict in (Verdict.PASS, Verdict.REGRESSION)
    if is_renewed:
        write_golden(bands.renewed(trial.recorded()), golden)
    verdict = Verdict.PASS if is_renewed else night.verdict
    if as_json:
        report = {"renewed": is_renewed, "report": str(folder / REPORT)}
        print_json(night.as_json() | {"exit_code": verdict.value} | report)
        raise typer.Exit(verdict.value)
    if is_renewed:
        say(f"{golden} renewed; it was a {night.verdict.name.lower()} before")
    say(f"nightly: {verdict.name.lower()}; {folder / REPORT}")
    raise typer.Exit(verdict.value)


def ablate_command(
    config: Annotated[Path, typer.Option("--config", help="An ablation's file, such as configs/ablation.yaml.")],
    overrides: Overrides = None,
    folder: Annotated[Path | None, typer.Option(help="Instead of the file's `folder`.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the points and their plans.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Also run again what crashed, timed out or ran out of memory.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Only write the report of the points that have run.")
    ] = False,
) -> None:
    """Train once for each point of a grid of settings, and compare: a table and a picture in FOLDER. Resumes.

    Exit codes: 0 all valid points finished, 2 nothing can run, 11 some failed, 129, 130 and 143 interrupted.
    """
    ablation = read_ablation(config, overrides or ())
    folder = folder or Path(ablation.folder)
    check_output_folder("--folder", folder)
    planned = plan_points(ablation, folder)
    for line in dict.fromkeys(f"{note.kind.value}: {note}" for one in planned for note in one.point.notes):
        say(line)
    if dry_run:
        rows = Ablation(ablation, folder, planned, say).rows()
        if not all(point.violations for point in planned):
            Terminal().print(dry_run_table(rows))
            for line in rule_lines(planned):
                say(line)
    if all(point.violations for point in planned):
        if not dry_run and folder.is_dir():
            with writing(), only_ablation(folder):  # in place of a report of what could run before
                Ablation(ablation, folder, planned, say).write_report()
        raise_problems("no point can run", [Violation({}, f"{names}: {rule}") for names, rule in broken_rules(planned)])
    if dry_run:
        return
    exit_on_signals()
    try:
        with writing(), only_ablation(folder):
            work = Ablation(ablation, folder, planned, say)
            rows = work.write_report() if report_only else work.run(retry_failed)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    say(f"{sum(row.result is not None for row in rows)} of {len(rows)} points have results; report in {folder}")
    if any(row.outcome in FAILED or (row.outcome is TrialOutcome.INVALID and row.seconds) for row in rows):
        raise typer.Exit(SOME_POINTS_FAILED)
