"""megatron-rl check-cluster | doctor: the nodes of a run, without the run; and this machine."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from megatron_rl.cli.options import ConfigPath, Overrides
from megatron_rl.cli.output import refuse_to_lose_output, say
from megatron_rl.cluster.loading import without_collections
from megatron_rl.cluster.signals import exit_on_signals, quit_on_signals, restore_signals
from megatron_rl.config.problems import raise_problems
from megatron_rl.errors import ConfigError
from megatron_rl.ledger.planner.checked import checked, planned_task
from megatron_rl.ledger.planner.hardware import planned_hardware
from megatron_rl.ledger.planner.memory_report import with_kv_cache
from megatron_rl.node_check.doctor import Condition, machine_facts, symptoms
from megatron_rl.observe.console import quiet_libraries
from megatron_rl.observe.summary import plain_table
from megatron_rl.observe.terminal import Terminal

ANY_STEPS = 1
"""Steps of a run whose length follows from its data, which is not read."""


def check_cluster_command(
    config: ConfigPath,
    overrides: Overrides = None,
    stage: Annotated[str | None, typer.Option(help="ppo | sft | reward | dpo. Default: trainer.stage.")] = None,
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
        from megatron_rl.controller.opening import check_nodes
    restore_signals()
    exit_on_signals()
    check_nodes(run_config, say)
    refuse_to_lose_output()


def doctor_command() -> None:
    """Say what this machine lacks: packages, GPUs, memory, disk, ports, compiler, trackers, and what to do.

    Exit code 2 where something is broken.
    """
    exit_on_signals()  # so that a program that is asked ends, too
    lines = symptoms(machine_facts(os.environ.get("RAY_ADDRESS", "")))
    rows = [(line.what, line.value, line.state.value, line.remedy) for line in lines]
    Terminal().print(plain_table("This machine", ("what", "value", "state", "what to do"), rows), markup=False)
    refuse_to_lose_output()
    if any(line.state is Condition.BROKEN for line in lines):
        raise typer.Exit(ConfigError.exit_code)
