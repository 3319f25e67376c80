"""megatron-rl rehearse: ranks of a run on GPUs that do not exist."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.cli.options import AsJson, ConfigPath, Overrides, check_number
from megatron_rl.cli.output import check_output_folder, print_json, refuse_to_lose_output, say
from megatron_rl.cluster.signals import exit_on_signals
from megatron_rl.cluster.stale_processes import leaving_none_running
from megatron_rl.config.problems import raise_problems
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.observe.terminal import Terminal
from megatron_rl.planning.checked_config import checked, planned_task
from megatron_rl.rehearse.comparison import beyond, peak_table, peaks_of
from megatron_rl.rehearse.fewer_layers import with_fewer_layers
from megatron_rl.rehearse.known_places import Places, found_places, new_places, read_places, text_of
from megatron_rl.rehearse.rehearsal import RehearsalError, faults_of, match_of, rehearse
from megatron_rl.rehearse.rehearsal_request import RehearsalRequest, chosen_ranks

ON_CUDA = "trainer.device=cuda"
MOST_LAYERS, MOST_JOBS = 1000, 256
ANY_STEPS = 1000
"""Steps of a run whose length follows from its data, which a rehearsal does not read; learning rates depend on it."""


def rehearse_command(
    config: ConfigPath,
    overrides: Overrides = None,
    ranks: Annotated[
        str | None, typer.Option(help="all, or 0,20,63: counted over all pools. Default: one of each pipeline stage.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of each pipeline stage's chunks. Default: all that the model has.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Ranks at the same time. Default: CPUs of this machine.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for one JSON file a rank, and a log.")] = Path("outputs/rehearsal"),
    stage: Annotated[str | None, typer.Option(help="ppo | sft | reward | dpo. Default: trainer.stage.")] = None,
    known: Annotated[
        Path | None, typer.Option(help="Accepted host waits and groups; another one ends with code 1.")
    ] = None,
    accept: Annotated[bool, typer.Option("--accept", help="Add what is found to the file of --known.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the code of some ranks as on GPUs, without a GPU, and compare memory with the plan. Also: dry-run.

    Needs neither a GPU nor weights: of models only config.json is read. Collectives, sends and receives of the
    rehearsed ranks are matched with each other. Exit code 1 where a phase needs 2% and 0.1 GB more than planned, where
    calls do not fit together, or where a rank's code fails; 2 where the configuration breaks a rule.
    """
    check_number("--layers", layers, 1, MOST_LAYERS)
    check_number("--jobs", jobs, 1, MOST_JOBS)
    check_output_folder("--out", out)
    accepted = _accepted(known, accept)
    given = (*(overrides or ()), ON_CUDA)
    run_config = _checked(config, given, stage)
    task, placement = run_config.trainer.stage, Placement.of(run_config)
    chosen = chosen_ranks(ranks, placement)
    if run_config.trainer.total_training_steps is None:
        given = (*given, f"trainer.total_training_steps={ANY_STEPS}")
    exit_on_signals()
    with tempfile.TemporaryDirectory(prefix="megatron_rl-rehearsal-") as folder, leaving_none_running():
        if layers is not None:
            given = (*given, *with_fewer_layers(run_config, layers, Path(folder)))
            run_config = _checked(config, given, stage)
        if not as_json:
            say(f"rehearsing {len(chosen)} ranks of {placement.world_size}")
        request = RehearsalRequest(str(config), given, task, chosen, jobs or os.cpu_count() or 1, str(out))
        reports = rehearse(request, Path(folder))
        peaks = peaks_of(run_config, reports)
    match = match_of(reports)
    wrong = beyond(peaks) + match.sentences() + faults_of(reports)
    if known is not None and accept:
        known.write_text(text_of(accepted, found_places(reports)))
    elif known is not None:
        wrong += new_places(found_places(reports), accepted, known)
    if as_json:
        phases = [asdict(peak) | {"is_beyond": peak.is_beyond} for peak in peaks]
        found = {"fits": not wrong, "faults": wrong, "ranks": [one.number for one in chosen], "calls": match.num_calls}
        print_json(found | {"peaks": phases})
    else:
        Terminal().print(peak_table(peaks))
        say(f"waits, memory by line and collectives of each rank: {out}/rank*.json")
        if match.fits:
            say(_matched(match.num_calls, len(reports), placement.world_size))
    refuse_to_lose_output()
    if wrong:
        raise RehearsalError("; ".join(wrong))


def _accepted(known: Path | None, accept: bool) -> Places:
    """Return the list of --known, before minutes are spent. Raises ConfigError where it cannot be read or written."""
    if known is None:
        if accept:
            raise ConfigError(
                "--accept adds to the file of --known, which is missing; try: --known places.txt --accept"
            )
        return {}
    if accept and not known.parent.is_dir():
        raise ConfigError(f"--known {known} must be in a folder that exists; try: mkdir -p {known.parent}")
    return {} if accept and not known.exists() else read_places(known)


def _matched(num_calls: int, num_ranks: int, world_size: int) -> str:
    others = "" if num_ranks == world_size else f", as far as they meet: {world_size} in all"
    return f"{num_calls} collectives, sends and receives of {num_ranks} ranks fit together{others}"


def _checked(config: Path, overrides: tuple[str, ...], stage: str | None) -> RunConfig:
    """Read the configuration, of models config.json alone. Raises ConfigError where it breaks a rule."""
    run = checked(config, overrides, True, change=lambda read: planned_task(read, stage), task=stage)
    raise_problems("this run cannot be rehearsed", run.violations)
    assert run.config is not None  # without one there are violations
    return run.config
