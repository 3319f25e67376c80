"""megatron-rl plan | map | profile | columns: what is known of a run before it starts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.cli.options import ConfigPath, Overrides, check_lengths, check_number
from megatron_rl.cli.output import check_output_file, print_json, refuse_to_lose_output, say, write_output
from megatron_rl.cluster.loading import without_collections
from megatron_rl.cluster.signals import exit_on_signals
from megatron_rl.columns import COLUMNS
from megatron_rl.config.declarations import readers_of
from megatron_rl.config.problems import raise_problems, violations_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.long_prompts import long_prompt_problems
from megatron_rl.errors import ConfigError
from megatron_rl.observe.console import quiet_libraries
from megatron_rl.observe.program import NAME, next_command
from megatron_rl.observe.summary import layout_table
from megatron_rl.observe.terminal import Terminal
from megatron_rl.planning.batch_arithmetic import batch_rows
from megatron_rl.planning.checked_config import CheckedConfig, checked, planned_task
from megatron_rl.planning.feature_table import as_json as rows_as_json
from megatron_rl.planning.feature_table import feature_lines, features_on, unproven_notes
from megatron_rl.planning.hardware import SUFFIXES, default_hardware, planned_hardware
from megatron_rl.planning.layout_search.explain import explain, explained
from megatron_rl.planning.layout_search.explain import lines as explain_lines
from megatron_rl.planning.layout_search.map_report import as_json as placements_as_json
from megatron_rl.planning.layout_search.map_report import placement_table, time_table
from megatron_rl.planning.layout_search.map_report import sentences as placement_sentences
from megatron_rl.planning.layout_search.placement_files import command_of, write_placement
from megatron_rl.planning.layout_search.random_placements import sampled, write_points
from megatron_rl.planning.layout_search.request import MapRequest, cluster_of, read_base
from megatron_rl.planning.layout_search.search_result import find_placements
from megatron_rl.planning.memory_report import with_kv_cache
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.run_plan import Plan, mean_lengths, plan_of
from megatron_rl.planning.served_states import served_as_json, served_note
from megatron_rl.profile.hardware_file import hardware_text
from megatron_rl.profile.hardware_file import sentences as profile_sentences
from megatron_rl.profile.hardware_file import tables as profile_tables
from megatron_rl.profile.profile import DeviceKind, number_of_gpus, profile, requested

MAP_WIDTH = 150
"""Columns that the tables of placements need."""
MOST_SAMPLED = 1000
DECIDED = re.compile(r"(parallel_size|nnodes|n_gpus_per_node|memory_bytes|memory_utilization|offload)$|pool")
"""Keys that `map` decides."""


Served = Annotated[
    int, typer.Option("--served", min=0, help="Host memory for the states of this number of models of `serve`.")
]


def plan_command(
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables and sentences.")] = False,
    without_files: Annotated[
        bool,
        typer.Option("--without-files", help="Read only config.json of models, and no data: plan before you download."),
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(help="a100 | h100 | h200 | b200 | cpu | FILE.yaml. Default: cpu or h100, as trainer.device."),
    ] = None,
    prompt_length: Annotated[
        float | None, typer.Option(help="Mean tokens of a prompt. Default: half the longest.")
    ] = None,
    response_length: Annotated[
        float | None, typer.Option(help="Mean tokens of a response. Default: half the longest.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="ppo | sft | reward | dpo. Default: trainer.stage.")] = None,
    whole: Annotated[
        bool,
        typer.Option("--all", help="All tables: batches, groups, memory by phase, seconds, weight transfer."),
    ] = False,
    features: Annotated[
        bool, typer.Option("--features", help="The features that are on, and what each does not go with; no tables.")
    ] = False,
    served: Served = 0,
) -> None:
    """Say whether a run fits into memory and how long a step takes, and every rule it breaks. Starts nothing.

    Exit code 2 where a rule is broken; a plan that exceeds the GPU's memory is reported, and is no error.
    """
    try:
        run = checked_with_prompts(config, overrides, without_files, stage)
        gpu = None if run.config is None else planned_hardware(run.config, hardware)
        if run.config is not None and not run.violations:
            check_lengths(run.config, prompt_length, response_length)
    except ConfigError as error:
        if not as_json:
            raise
        run, gpu = CheckedConfig(None, violations_of(error)), None
    run_config, violations = run.config, run.violations
    plan: Plan | None = None
    if run_config is not None and gpu is not None and not violations:
        with without_collections():  # an exchange plan is up to a million objects, and all of them stay
            models = RunModels(run_config) if run_config.generates else None
            run_config = with_kv_cache(run_config, gpu, variant_of=models) if models is not None else run_config
            plan = plan_of(run_config, gpu, prompt_length, response_length, variant_of=models)
    if as_json:
        print_plan(run, plan, features, served)
        raise typer.Exit(ConfigError.exit_code if violations else 0)
    console = Terminal()
    if features and run_config is not None:
        say_features(run_config, console)
    elif plan is not None:
        title = f"Plan of {config}, on {plan.memory.hardware.name}"
        for table in plan.tables() if whole else [layout_table(plan.rows(), title)]:
            console.print(table)
        for line in plan_lines(plan, run, config, overrides or (), hardware, whole, served):
            say(line, console)
    elif run_config is not None and not any(each.subject.startswith("unknown key") for each in violations):
        console.print(layout_table(batch_rows(run_config)))
    refuse_to_lose_output()
    raise_problems("this run cannot start", violations)


def print_plan(run: CheckedConfig, plan: Plan | None, features: bool, served: int) -> None:
    """Print a plan as JSON. features: with the features that are on. served: number of models of a service."""
    content = {"valid": not run.violations, "violations": [violation.as_json() for violation in run.violations]}
    content |= run.as_json() | ({"plan": plan.as_json()} if plan else {})
    if plan is not None and served:
        content["served"] = served_as_json(plan.models, served)
    if features and run.config is not None:
        content["features"] = rows_as_json(features_on(run.config))
    print_json(content)
    refuse_to_lose_output()


def say_features(config: RunConfig, console: Terminal) -> None:
    """Print the features that are on, and those that no run on such a device has shown."""
    for line in (*feature_lines(features_on(config)), *unproven_notes(config)):
        say(line, console)


def plan_lines(
    plan: Plan,
    run: CheckedConfig,
    config: Path,
    overrides: Sequence[str],
    hardware: str | None,
    whole: bool,
    served: int,
) -> list[str]:
    """Return the lines below the tables: notes, changes of a plan that does not fit, and the command that leads on."""
    lines = [*run.lines(whole), *plan.notes(), *unproven_notes(plan.config)]
    lines += [served_note(plan.models, served)] if served else []
    if plan.fitting is not None and plan.config.generates:
        further = "" if plan.fitting.is_enough else ", which names the smallest cluster that would do"
        lines.append(f"  search all layouts: {search_command(plan, config, overrides, hardware)}{further}")
    return lines if whole else [*lines, "all tables: the same command with --all"]


def search_command(plan: Plan, config: Path, overrides: Sequence[str], hardware: str | None) -> str:
    """Return the command that searches other layouts of the run, on as many ranks, with the overrides that it keeps."""
    ranks = plan.models.placement.world_size
    kept = [text for text in overrides if not DECIDED.search(text.partition("=")[0])]
    chosen = () if hardware is None else ("--hardware", hardware)
    return next_command("map", "--config", config, "--gpus", ranks, *chosen, *kept)


def checked_with_prompts(
    path: Path, overrides: Sequence[str] | None, without_files: bool, stage: str | None
) -> CheckedConfig:
    """Read and check a configuration for `plan`, and where nothing else is wrong the lengths of its prompts."""
    run = checked(path, overrides, without_files, change=lambda read: planned_task(read, stage), task=stage)
    if run.config is None or run.violations or without_files:
        return run
    return replace(run, violations=long_prompt_problems(run.config, lambda path: ModelFolder(path).tokenizer))


def map_command(
    config: ConfigPath,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of the cluster, or processes where trainer.device=cpu.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="More of --keep: KEY=VALUE.")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="a100 | h100 | h200 | b200 | cpu | FILE.yaml. Default: cpu or h100, as trainer.device."),
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of one machine. Default: 8, or fewer.")] = None,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", help="KEY=VALUE that must stay, and those after it. May be repeated.")
    ] = None,
    explain_key: Annotated[str | None, typer.Option("--explain", help="KEY: what another value would change.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write the fastest placement to.")] = None,
    picture: Annotated[Path | None, typer.Option(help="PNG to write: a timeline of each placement.")] = None,
    points: Annotated[Path | None, typer.Option(help="Ablation's file to write: the fastest, and random ones.")] = None,
    sample: Annotated[int, typer.Option(help="Random placements of --points.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    prompt_length: Annotated[float | None, typer.Option(help="Mean tokens of a prompt. Default: half.")] = None,
    response_length: Annotated[float | None, typer.Option(help="Mean tokens of a response. Default: half.")] = None,
) -> None:
    """Find the fastest layout for a number of GPUs, and which pool each role runs in. Also: search-layout.

    Starts nothing: seconds are those of `plan`. Of models only config.json is read. Exit code 2 where nothing
    fits or a kept value breaks a rule.
    """
    check_number("--sample", sample, 1, MOST_SAMPLED)
    for option, file in (("--out", out), ("--points", points)):
        check_output_file(option, file)
    if picture is not None:
        from megatron_rl.planning.layout_search.map_picture import draw_placements, picture_suffixes

        check_output_file("--picture", picture, picture_suffixes())
    kept = [*(overrides or []), *(keep or [])]
    reading, run_config, keeps = read_base(config, kept)
    check_lengths(run_config, prompt_length, response_length)
    cluster = cluster_of(run_config, gpus, gpus_per_node, keeps)
    gpu = planned_hardware(run_config, hardware, cluster.num_nodes)
    lengths = mean_lengths(run_config.data, prompt_length, response_length)
    request = MapRequest(config, tuple(kept), reading.settings, run_config, gpu, cluster, keeps, lengths, gpus_per_node)
    mapped = find_placements(request)
    best = mapped.candidates[0]
    others = explain(mapped, explain_key) if explain_key is not None else []
    if out is not None:
        write_placement(request, best, out)
    if points is not None:
        named = hardware or run_config.trainer.hardware_file or default_hardware(run_config.trainer.device)
        write_points(request, best, sampled(request, sample), named, points)
    if picture is not None:
        write_output(picture, draw_placements(mapped, picture.suffix))
    command = command_of(request, best, out)
    if as_json:
        written = {"command": shlex.join([NAME, *command]), "explained": explained(others)}
        print_json(placements_as_json(mapped) | written)
        refuse_to_lose_output()
        return
    console = Terminal(width=max(Terminal().width, MAP_WIDTH))
    for table in (placement_table(mapped), time_table(mapped)):
        console.print(table)
    for line in (*placement_sentences(mapped), *explain_lines(others, explain_key or ""), next_command(*command)):
        say(line, console)
    refuse_to_lose_output()


def profile_command(
    hardware_file: Annotated[
        Path, typer.Option("--hardware-file", help="The file to write, for plan, map and ablate --hardware.")
    ] = Path("outputs/hardware.yaml"),
    ranks: Annotated[
        int | None, typer.Option(help="Ranks of this machine. Default: its GPUs, or 4 processes on CPUs.")
    ] = None,
    device: Annotated[DeviceKind | None, typer.Option(help="Default: cuda where there is a GPU, else cpu.")] = None,
    short_run: Annotated[bool, typer.Option(help="Also a run of a few steps, to measure calls and resharding.")] = True,
) -> None:
    """Measure this machine in a few minutes, and write a hardware file with which plan and map estimate seconds."""
    check_output_file("--hardware-file", hardware_file, SUFFIXES)
    request = requested(None if device is None else device.value, ranks, number_of_gpus())
    quiet_libraries()
    exit_on_signals()
    measured = profile(request, say, short_run)
    write_output(hardware_file, hardware_text(measured).encode())
    for table in profile_tables(measured):
        Terminal().print(table)
    for line in profile_sentences(measured):
        say(line)
    say(f"written to {hardware_file}; plan with it: add --hardware {hardware_file} to `plan`, `map` and `ablate`")


def columns_command(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Print the columns of a batch: what they hold, who makes them and who reads them."""
    refuse_to_lose_output()
    rows = [(column, [*column.readers, *readers_of(column.name)]) for column in COLUMNS.values()]
    if as_json:
        held = {column.name for column, _ in rows if column.is_held}
        listed = [asdict(each) | {"readers": readers, "held": each.name in held} for each, readers in rows]
        print_json({"columns": listed})
        return
    for column, readers in rows:
        say(f"{column.name}: {column.dtype}, one per {column.shape}; {column.text}")
        say(f"    made by {column.maker}")
        say(f"    read by {', '.join(readers) or 'no pass, estimator or loss'}")
