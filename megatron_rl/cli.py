"""The command line: megatron-rl sft | reward | dpo | train | plan | map | profile | ablate | export |
average | nightly.

Configuration mistakes are reported before torch, Ray or vLLM is imported; exit codes are those of `errors.py`.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from megatron_rl.checkpoint.storage import writing
from megatron_rl.cli_weights import average_command, export_command
from megatron_rl.cluster.signals import exit_on_signals
from megatron_rl.config.as_stage import as_stage
from megatron_rl.config.foreign.translate import Kind
from megatron_rl.config.one_rank import collapsed
from megatron_rl.config.problems import raise_problems, violations_of
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.stages import DPO, PPO, REWARD, SFT, WITHOUT_ROLLOUT
from megatron_rl.errors import ConfigError, MegatronRLError, StorageError, Violation
from megatron_rl.loading import without_collections
from megatron_rl.mapping.explain import explain, explained
from megatron_rl.mapping.explain import lines as explain_lines
from megatron_rl.mapping.mapped import find_placements
from megatron_rl.mapping.report import as_json as placements_as_json
from megatron_rl.mapping.report import placement_table, time_table
from megatron_rl.mapping.report import sentences as placement_sentences
from megatron_rl.mapping.request import Request, cluster_of, read_base
from megatron_rl.mapping.sample import sampled, write_points
from megatron_rl.mapping.written import command_of, write_placement
from megatron_rl.observe.output import drop_unread_output, lost_output
from megatron_rl.observe.quiet import quiet_engines, quiet_libraries
from megatron_rl.observe.summary import finite_or_null, layout_table
from megatron_rl.planner.batch_arithmetic import batch_table, stage_table
from megatron_rl.planner.cache_share import with_kv_cache
from megatron_rl.planner.checked import Checked, checked, staged
from megatron_rl.planner.hardware import default_hardware, planned_hardware
from megatron_rl.planner.run_plan import RunPlan, mean_lengths
from megatron_rl.planner.stage_plan import StagePlanned
from megatron_rl.port.port import SOMETHING_LOST, port
from megatron_rl.profiling.profile import CPU_RANKS, DeviceKind, number_of_gpus, profile
from megatron_rl.profiling.profile import Request as ProfileRequest
from megatron_rl.profiling.written import hardware_text
from megatron_rl.profiling.written import sentences as profile_sentences
from megatron_rl.profiling.written import tables as profile_tables
from megatron_rl.roles.environment import worker_environment
from megatron_rl.trials.ablation import Ablation, only_ablation
from megatron_rl.trials.ablation_file import read_ablation
from megatron_rl.trials.ablation_report import dry_run_tables
from megatron_rl.trials.golden import read_golden, write_golden
from megatron_rl.trials.nightly import REPORT, nightly_trial, run_nightly
from megatron_rl.trials.outcome import FAILED, TrialOutcome
from megatron_rl.trials.planned import plan_points
from megatron_rl.trials.verdict import Verdict

app = typer.Typer(
    help="PPO with Megatron training and vLLM generation on one memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SOME_POINTS_FAILED = 11
"""Exit code of an ablation some of whose valid points have no result."""

MAP_WIDTH = 150
"""Columns that the tables of placements need."""

ConfigPath = Annotated[Path, typer.Option("--config", help="YAML file, such as configs/demo_cpu.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Dotted overrides: trainer.seed=2 data.shuffle=false")]


Local = Annotated[
    bool, typer.Option("--local", help="One rank, all roles in this process, without Ray: for a debugger.")
]
Collapse = Annotated[bool, typer.Option("--collapse", help="Run on one rank whatever layout and pools are configured.")]


@app.command("train")
def train_command(
    config: ConfigPath,
    overrides: Overrides = None,
    local: Local = False,
    collapse: Collapse = False,
    replay: Annotated[
        Path | None, typer.Option("--replay", help="The folder of an asynchronous run, to repeat it bit for bit.")
    ] = None,
) -> None:
    """Train as configured; metrics, curves and the model go to trainer.default_local_dir."""
    run_config = startable(config, overrides, PPO, collapse)
    if replay is not None:
        check_replay(run_config, replay)
    run_config = made_ready(run_config, local)
    with without_collections():
        from megatron_rl.train import train

    train(run_config, local, replay)


@app.command("sft")
def sft_command(
    config: ConfigPath, overrides: Overrides = None, local: Local = False, collapse: Collapse = False
) -> None:
    """Fine-tune the actor's model on given answers, text or conversations."""
    run_config = made_ready(startable(config, overrides, SFT, collapse), local)
    with without_collections():
        from megatron_rl.stages.sft import sft

    sft(run_config, local)


@app.command("reward")
def reward_command(
    config: ConfigPath, overrides: Overrides = None, local: Local = False, collapse: Collapse = False
) -> None:
    """Train a reward model, under the keys of `critic`, on preferences, rankings or scored answers."""
    run_config = made_ready(startable(config, overrides, REWARD, collapse), local)
    with without_collections():
        from megatron_rl.stages.reward import reward

    reward(run_config, local)


@app.command("dpo")
def dpo_command(
    config: ConfigPath, overrides: Overrides = None, local: Local = False, collapse: Collapse = False
) -> None:
    """Have the actor's model learn preferences directly: dpo.loss=dpo | ipo | kto | simpo | orpo."""
    run_config = made_ready(startable(config, overrides, DPO, collapse), local)
    with without_collections():
        from megatron_rl.stages.dpo import dpo

    dpo(run_config, local)


def startable(path: Path, overrides: Sequence[str] | None, stage: str, collapse: bool) -> RunConfig:
    """The configuration of a stage. Raises ConfigError with everything that is wrong; notes go to stderr."""
    run = checked(path, overrides, change=lambda config: as_stage(collapsed(config) if collapse else config, stage))
    raise_problems("this run cannot start", run.violations)
    assert run.config is not None  # a file without a configuration has violations
    for note in run.notes:
        Console(stderr=True).print(f"{note.kind.value}: {note}", soft_wrap=True, highlight=False, markup=False)
    return run.config


def made_ready(run_config: RunConfig, local: bool) -> RunConfig:
    """Prepare this process for a run, before engines are imported."""
    if local:
        run_config = on_one_rank(run_config)
        os.environ |= worker_environment(run_config.trainer.device, ranks_per_node=1)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
            del os.environ["PYTHONBREAKPOINT"]  # Ray's own debugger, which a shell inherits from a Ray job
        quiet_engines()
    quiet_libraries()
    return run_config


def check_replay(config: RunConfig, replay: Path) -> None:
    """Have a run repeat another's schedule: from its beginning, in a folder of its own. Raises ConfigError."""
    trainer = config.trainer
    if not config.samples_in_slices:
        raise ConfigError(
            "--replay needs the configuration of the run that it repeats: this one has trainer.rollout_ahead=0"
        )
    if Path(trainer.default_local_dir).resolve() == replay.resolve():
        raise ConfigError(
            f"--replay {replay} would overwrite what it repeats; nearest: trainer.default_local_dir={replay}_again"
        )
    trainer.save_freq, trainer.resume_mode, trainer.resume_from_path = -1, "disable", None


def on_one_rank(config: RunConfig) -> RunConfig:
    """The run in one pool of one rank. Raises ConfigError where a pool has more than one."""
    sizes = {name: pool.size for name, pool in Placement.of(config).pools.items()}
    larger = [f"{name} has {size.world_size} ({size})" for name, size in sizes.items() if size.world_size > 1]
    if larger:
        rule = "--local runs one rank in this process, and"
        raise ConfigError(f"{rule} {', '.join(larger)}; nearest: --local --collapse")
    return collapsed(config) if len(sizes) > 1 else config


@app.command("port", context_settings={"ignore_unknown_options": True})
def port_command(
    arguments: Annotated[
        list[str],
        typer.Argument(help="SCRIPT.sh or verl's YAML, and Hydra arguments; or these alone."),
    ],
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: to stdout.")] = None,
) -> None:
    """Turn a launch script of verl into a file for `train --config`; says what is renamed, ignored and not supported.

    The script's shell is run with stubs for every program. Exit codes: 0 nothing of substance is lost, 3 something is.
    """
    first = None if "=" in arguments[0] or arguments[0].startswith("-") else Path(arguments[0])
    result = port(first, arguments if first is None else arguments[1:], os.environ)
    said = Console(stderr=out is None)
    if out is None:
        sys.stdout.write(result.yaml())
        refuse_to_lose_output()
    else:
        with writing():
            out.write_text(result.yaml())
    for line in result.lists():
        said.print(line, soft_wrap=True, highlight=False, markup=False)
    if out is not None:
        said.print(f"written to {out}", soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(SOMETHING_LOST if result.of(Kind.UNSUPPORTED) else 0)


@app.command("plan")
def plan_command(
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables and sentences.")] = False,
    without_files: Annotated[
        bool,
        typer.Option("--without-files", help="Of models read config.json alone, and no data: plan, then download."),
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(help="a100 | h100 | h200 | b200 | cpu | FILE.yaml. Default: cpu or h100, as trainer.device."),
    ] = None,
    prompt_length: Annotated[
        float | None, typer.Option(help="Mean tokens of a prompt. Default: half the longest.")
    ] = None,
    response_length: Annotated[
        float | None, typer.Option(help="Mean tokens of an answer. Default: half the longest.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="ppo | sft | reward | dpo. Default: trainer.stage.")] = None,
) -> None:
    """Print layout, groups, memory, time and transition, and every rule the configuration breaks. Starts nothing.

    Exit code 2 where a rule is broken; a plan that does not fit the GPU's memory is said to, and is no error.
    """
    try:
        run = checked(config, overrides, without_files, change=lambda found: staged(found, stage))
        gpu = None if run.config is None else planned_hardware(run.config.trainer, hardware)
    except ConfigError as error:
        if not as_json:
            raise
        run, gpu = Checked(None, violations_of(error)), None
    run_config, violations = run.config, run.violations
    plan: RunPlan | StagePlanned | None = None
    if run_config is not None and gpu is not None and not violations and run_config.trainer.stage in WITHOUT_ROLLOUT:
        lengths = [length for length in (prompt_length, response_length) if length is not None]
        plan = StagePlanned.of(run_config, gpu, sum(lengths) or None)
    elif run_config is not None and gpu is not None and not violations:
        run_config = with_kv_cache(run_config, gpu)
        plan = RunPlan.of(run_config, gpu, mean_lengths(run_config.data, prompt_length, response_length))
    if as_json:
        content = {"valid": not violations, "violations": [violation.as_json() for violation in violations]}
        content |= run.as_json()
        print_json(content | ({"plan": plan.as_json()} if plan else {}))
        refuse_to_lose_output()
        raise typer.Exit(ConfigError.exit_code if violations else 0)
    console = Console()
    if plan is not None:
        for table in plan.tables():
            console.print(table)
        for note in (*run.lines(), *plan.notes()):
            console.print(note, soft_wrap=True, highlight=False, markup=False)
    elif run_config is not None:
        is_ppo = run_config.trainer.stage not in WITHOUT_ROLLOUT
        console.print(layout_table(batch_table(run_config) if is_ppo else stage_table(run_config)))
    refuse_to_lose_output()
    raise_problems("this run cannot start", violations)


@app.command("map")
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
    sample: Annotated[int, typer.Option(help="Random placements of --points.", min=1)] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    prompt_length: Annotated[float | None, typer.Option(help="Mean tokens of a prompt. Default: half.")] = None,
    response_length: Annotated[float | None, typer.Option(help="Mean tokens of an answer. Default: half.")] = None,
) -> None:
    """Find the fastest placement of roles on pools and layout of each, by the clock of `plan`. Starts nothing.

    Of models config.json is read alone. Exit code 2 where nothing fits or a kept value breaks a rule.
    """
    kept = [*(overrides or []), *(keep or [])]
    run_config, keeps = read_base(config, kept)
    gpu = planned_hardware(run_config.trainer, hardware)
    cluster = cluster_of(run_config, gpus, gpus_per_node, keeps)
    lengths = mean_lengths(run_config.data, prompt_length, response_length)
    request = Request(config, tuple(kept), run_config, gpu, cluster, keeps, lengths, gpus_per_node)
    mapped = find_placements(request)
    best = mapped.candidates[0]
    others = explain(mapped, explain_key) if explain_key is not None else []
    if out is not None:
        write_placement(request, best, out)
    if points is not None:
        named = hardware or run_config.trainer.hardware_file or default_hardware(run_config.trainer.device)
        write_points(request, best, sampled(request, sample), named, points)
    if picture is not None:
        from megatron_rl.mapping.picture import draw_placements

        with writing():
            draw_placements(mapped, picture)
    command = command_of(request, best, out)
    if as_json:
        print_json(placements_as_json(mapped) | {"command": command, "explained": explained(others)})
        refuse_to_lose_output()
        return
    console = Console(width=max(Console().width, MAP_WIDTH))
    for table in (placement_table(mapped), time_table(mapped)):
        console.print(table)
    for line in (*placement_sentences(mapped), *explain_lines(others, explain_key or "")):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(command, soft_wrap=True, highlight=False, markup=False)
    refuse_to_lose_output()


@app.command("profile")
def profile_command(
    hardware_file: Annotated[
        Path, typer.Option("--hardware-file", help="The file to write, for plan, map and ablate --hardware.")
    ] = Path("outputs/hardware.yaml"),
    ranks: Annotated[
        int | None, typer.Option(help="Ranks of this machine. Default: its GPUs, or 4 processes on CPUs.")
    ] = None,
    device: Annotated[DeviceKind | None, typer.Option(help="Default: cuda where there is a GPU, else cpu.")] = None,
    short_run: Annotated[bool, typer.Option(help="Also a run of a few steps, for calls and transition.")] = True,
) -> None:
    """Measure what the clock of plan and map needs to know of this machine, in minutes, and write a hardware file."""
    quiet_libraries()
    exit_on_signals()
    console = Console()

    def say(text: object) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    found = number_of_gpus()
    kind = (device or (DeviceKind.CUDA if found else DeviceKind.CPU)).value
    measured = profile(ProfileRequest(kind, ranks or (found if kind == "cuda" else CPU_RANKS)), say, short_run)
    with writing():
        hardware_file.parent.mkdir(parents=True, exist_ok=True)
        hardware_file.write_text(hardware_text(measured))
    for table in profile_tables(measured):
        console.print(table)
    for line in profile_sentences(measured):
        say(line)
    say(f"written to {hardware_file}; try megatron-rl plan --hardware {hardware_file}")


def print_json(content: dict[str, Any]) -> None:
    """To stdout, indented, with null for numbers that JSON does not have."""
    sys.stdout.write(json.dumps(finite_or_null(content), indent=2, allow_nan=False) + "\n")


def refuse_to_lose_output() -> None:
    """For a command whose product is what it prints. Raises StorageError where its file could not take it."""
    error = lost_output(sys.stdout)
    if error is not None:
        raise StorageError(f"what was to be printed could not be written to stdout: {error.strerror}")


app.command("export")(export_command)
app.command("average")(average_command)


@app.command("nightly")
def nightly_command(
    config: ConfigPath,
    overrides: Overrides = None,
    golden: Annotated[Path, typer.Option(help="Golden metrics and their bands.")] = Path("configs/nightly_golden.json"),
    folder: Annotated[Path, typer.Option(help="Emptied first where it is a nightly's own.")] = Path("outputs/nightly"),
    renew: Annotated[bool, typer.Option("--renew", help="Put what this run reaches into the golden file.")] = False,
) -> None:
    """Train, stop in the middle, go on, compare with golden metrics; FOLDER/report.md.

    Exit codes: 0 pass, 2 invalid configuration, 10 regression, 11 crash, 12 hang.
    """
    bands = read_golden(golden)
    raise_problems("this run cannot start", checked(config, overrides).violations)
    trial = nightly_trial(bands, config, folder, overrides or ())
    exit_on_signals()  # so that training ends, too
    verdict = run_nightly(trial, bands, shlex.join(["megatron-rl", *sys.argv[1:]]))
    if renew and verdict in (Verdict.PASS, Verdict.REGRESSION):
        write_golden(bands.renewed(trial.recorded()), golden)
        Console().print(f"{golden} renewed; it was a {verdict.name.lower()} before", soft_wrap=True, markup=False)
        verdict = Verdict.PASS
    Console().print(f"nightly: {verdict.name.lower()}; {folder / REPORT}", soft_wrap=True, markup=False)
    raise typer.Exit(verdict.value)


@app.command("ablate")
def ablate_command(
    config: Annotated[Path, typer.Option("--config", help="An ablation's file, such as configs/ablation.yaml.")],
    overrides: Overrides = None,
    folder: Annotated[Path | None, typer.Option(help="Instead of the file's `folder`.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the points and what is planned, no more.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Also run again what crashed, timed out or ran out of memory.")
    ] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the report of what has run.")] = False,
) -> None:
    """Run every point of a grid of layouts and options; a table and a picture in FOLDER. Goes on where it was stopped.

    Exit codes: 0 all valid points finished, 2 nothing can run, 11 some failed, 129, 130 and 143 interrupted.
    """
    ablation = read_ablation(config, overrides or ())
    folder = folder or Path(ablation.folder)
    planned = plan_points(ablation, folder)
    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    if dry_run:
        for table in dry_run_tables(Ablation(ablation, folder, planned, say).rows()):
            console.print(table)
    if all(point.violations for point in planned):
        raise_problems("no point can run", [Violation({}, f"{one.point.name}: {one.reason}") for one in planned])
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


def refuse_hydra_options(arguments: Sequence[str]) -> None:
    """Hydra's names of configuration files mean something to `port` alone. Raises ConfigError with what to do."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in ("--config-path", "--config-name", "--config-dir") and arguments[0] != "port":
            rule = "is Hydra's, and no file of verl's is read here: its values are verl's defaults"
            raise ConfigError(f"{name} {rule}; nearest: --config FILE.yaml, made by megatron-rl port SCRIPT.sh")


def main() -> None:
    """Run the command line; an error we raise on purpose becomes one message and its exit code, without a traceback."""
    drop_unread_output()
    try:
        refuse_hydra_options(sys.argv[1:])
        app()
    except MegatronRLError as error:
        message = Text.assemble((type(error).__name__, "bold red"), f": {error}")
        Console(stderr=True).print(message, soft_wrap=True, highlight=False)
        sys.exit(error.exit_code)
