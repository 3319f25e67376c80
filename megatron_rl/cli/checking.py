"""megatron-rl check-cluster | doctor: the nodes of a run, without the run; and this machine."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.cli.options import AsJson, ConfigPath, Overrides
from megatron_rl.cli.output import print_json, refuse_to_lose_output, say
from megatron_rl.cluster.loading import without_collections
from megatron_rl.cluster.signals import exit_on_signals, quit_on_signals, restore_signals
from megatron_rl.config.problems import raise_problems
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.node_check.doctor import Condition, RunNeeds, machine_facts, symptoms, verdict
from megatron_rl.observe.console import quiet_libraries
from megatron_rl.observe.summary import plain_table
from megatron_rl.observe.terminal import Terminal
from megatron_rl.planning.checked_config import checked, planned_task
from megatron_rl.planning.hardware import planned_hardware
from megatron_rl.planning.memory_report import with_kv_cache
from megatron_rl.planning.repair_copies import copied_here
from megatron_rl.planning.run_models import RunModels

ANY_STEPS = 1
"""Steps of a run whose length follows from its data, which is not read."""


def check_cluster_command(
    config: ConfigPath,
    overrides: Overrides = None,
    stage: Annotated[str | None, typer.Option(help="ppo | sft | reward | dpo. Default: trainer.stage.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check the nodes of a cluster for a run: versions, GPUs, NVLink, InfiniBand, free memory, clocks, all-reduce.

    Joins Ray, or starts it, as the run would, and trains nothing. Of models config.json is read alone. Exit code 2
    with every fault, its node, value and rule.
    """
    run = checked(config, overrides, True, change=lambda read: planned_task(read, stage), task=stage)
    raise_problems("this run cannot start", run.violations)
    assert run.config is not None  # without one there are violations
    run_config = run.config
    if run_config.generates:
        run_config = with_kv_cache(run_config, planned_hardware(run_config))
    run_config.trainer.total_training_steps = run_config.trainer.total_training_steps or ANY_STEPS
    quiet_libraries()
    quit_on_signals()
    with without_collections():
        from megatron_rl.controller.run_setup import check_nodes
    restore_signals()
    exit_on_signals()
    if not as_json:
        check_nodes(run_config, say)
        refuse_to_lose_output()
        return
    lines, faults = list[str](), list[str]()
    try:
        check_nodes(run_config, lines.append)
    except ConfigError as error:
        faults = [str(violation) for violation in error.violations] or [str(error)]
    print_json({"fits": not faults, "lines": lines, "faults": faults})
    refuse_to_lose_output()
    if faults:
        raise typer.Exit(ConfigError.exit_code)


def copied_bytes_here(config: RunConfig) -> int:
    """Return the bytes of shared memory that copies for repairs need; 0 where its models cannot be planned yet."""
    try:
        return copied_here(config, RunModels(config).pools) if config.trainer.max_repairs else 0
    except ConfigError:
        return 0


def doctor_command(
    config: Annotated[
        Path | None, typer.Option("--config", help="Also what this configuration needs: trackers, disk for its files.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine lacks: packages, GPUs, memory, disk, ports, compiler, trackers, and what to do.

    Exit code 2 where something is broken.
    """
    needs = RunNeeds()
    if config is not None:
        run = checked(config, overrides, without_files=True)
        raise_problems("this configuration cannot be read", run.violations)
        assert run.config is not None  # without one there are violations
        trainer = run.config.trainer
        needs = RunNeeds(tuple(trainer.logger), trainer.default_local_dir, copied_bytes_here(run.config))
    exit_on_signals()  # so that a program that is asked ends, too
    lines = symptoms(machine_facts(os.environ.get("RAY_ADDRESS", ""), needs))
    is_broken = any(line.state is Condition.BROKEN for line in lines)
    if as_json:
        print_json({"ready": not is_broken, "lines": [asdict(line) for line in lines]})
    else:
        rows = [(line.what, line.value, line.state.value, line.remedy) for line in lines]
        Terminal().print(plain_table("This machine", ("what", "value", "state", "what to do"), rows), markup=False)
        say(verdict(lines))
    refuse_to_lose_output()
    if is_broken:
        raise typer.Exit(ConfigError.exit_code)
