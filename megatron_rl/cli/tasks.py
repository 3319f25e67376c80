"""megatron-rl sft | reward | dpo | train: the commands that start a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.cli.next_commands import say_next
from megatron_rl.cli.options import ConfigPath, Overrides
from megatron_rl.cli.output import say
from megatron_rl.cluster.loading import without_collections
from megatron_rl.cluster.signals import quit_on_signals, restore_signals
from megatron_rl.config.eval_config import EVALUATION, for_evaluation
from megatron_rl.config.one_rank import collapsed
from megatron_rl.config.problems import raise_problems
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import Config, RunConfig
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.config.tasks import DPO, PPO, REWARD, SFT
from megatron_rl.errors import ConfigError, StoppedBeforeStep
from megatron_rl.observe.console import quiet_libraries
from megatron_rl.observe.terminal import Announcer, Terminal
from megatron_rl.planning.checked_config import checked, commanded
from megatron_rl.planning.file_rules import INTERPRETER
from megatron_rl.planning.preset_section import left_out_lines
from megatron_rl.roles.environment import worker_environment

LOCAL = (
    "Run in this one process on this machine, without Ray: the quickest start, and what a debugger needs. "
    "Where the configuration has several ranks, add --collapse."
)
Local = Annotated[bool, typer.Option("--local", help=LOCAL)]
Collapse = Annotated[
    bool, typer.Option("--collapse", help="Run on one rank, whatever layout and pools are configured.")
]


def train_command(
    config: ConfigPath,
    overrides: Overrides = None,
    local: Local = False,
    collapse: Collapse = False,
    replay: Annotated[
        Path | None, typer.Option("--replay", help="The folder of an asynchronous run, to repeat it bit for bit.")
    ] = None,
    rollouts_from: Annotated[
        Path | None,
        typer.Option("--rollouts-from", help="The folder of a run with recorded samples (trainer.rollouts_from)."),
    ] = None,
) -> None:
    """Train with RL: PPO, GRPO, ... Metrics, curves and the model go to trainer.default_local_dir."""
    given = [] if rollouts_from is None else [f"trainer.rollouts_from={rollouts_from}"]
    run_config = startable(config, [*(overrides or ()), *given], PPO, collapse, is_replay=replay is not None)
    if replay is not None:
        check_replay(run_config, replay)
    run_config = made_ready(run_config, local)
    if run_config.trainer.val_only:
        # Not among the files of the run itself, which would be replaced.
        run_config.trainer.default_local_dir = str(Path(run_config.trainer.default_local_dir) / EVALUATION)
        start_evaluation(run_config, local)
        return
    with imports_of(run_config):
        from megatron_rl.train import train

    train(run_config, local, replay)
    say_next(config, overrides, run_config, given_options(local, collapse))


def sft_command(
    config: ConfigPath, overrides: Overrides = None, local: Local = False, collapse: Collapse = False
) -> None:
    """Fine-tune a model on given responses (SFT): texts or conversations."""
    run_config = startable_task(config, overrides, SFT, local, collapse)
    with imports_of(run_config):
        from megatron_rl.tasks.sft import sft

    sft(run_config, local)
    say_next(config, overrides, run_config, given_options(local, collapse))


def reward_command(
    config: ConfigPath, overrides: Overrides = None, local: Local = False, collapse: Collapse = False
) -> None:
    """Train a reward model on preferences, rankings or scored responses; its keys are those of `critic`."""
    run_config = startable_task(config, overrides, REWARD, local, collapse)
    with imports_of(run_config):
        from megatron_rl.tasks.reward import reward

    reward(run_config, local)
    say_next(config, overrides, run_config, given_options(local, collapse))


def dpo_command(
    config: ConfigPath, overrides: Overrides = None, local: Local = False, collapse: Collapse = False
) -> None:
    """Train a model on preferences directly (DPO): dpo.loss=dpo | ipo | kto | simpo | ..., or several."""
    run_config = startable_task(config, overrides, DPO, local, collapse)
    with imports_of(run_config):
        from megatron_rl.tasks.dpo import dpo

    dpo(run_config, local)
    say_next(config, overrides, run_config, given_options(local, collapse))


def given_options(local: bool, collapse: bool) -> list[str]:
    """Return the options of a run as they were typed."""
    return [name for name, given in (("--local", local), ("--collapse", collapse)) if given]


def startable(
    path: Path,
    overrides: Sequence[str] | None,
    task: str,
    collapse: bool,
    further: Callable[[RunConfig], RunConfig] = lambda config: config,
    is_replay: bool = False,
    serves: bool = False,
) -> RunConfig:
    """Read the configuration of a task. further: a last change of it. is_replay: turns have their replies, and the
    interpreter of environments need not exist. serves: several versions of adapters may be sampled.

    Raises ConfigError with everything that is wrong; notes go to stderr.
    """

    def change(config: RunConfig) -> RunConfig:
        config = commanded(collapsed(config) if collapse else config, task)
        return further(for_evaluation(config) if config.trainer.val_only else config)

    run = checked(path, overrides, change=change, task=task)
    unused = {INTERPRETER} if is_replay else set()
    raise_problems("this run cannot start", [each for each in run.violations if each.settings.keys() != unused])
    assert run.config is not None  # a file without a configuration has violations
    if (slots := run.config.actor_rollout_ref.rollout.max_loras) > 1 and not serves and run.config.generates:
        rule = f"actor_rollout_ref.rollout.max_loras={slots} is for `serve`: this command samples one version at a time"
        raise ConfigError(f"{rule}; try: actor_rollout_ref.rollout.max_loras=1")
    notes = [f"{note.kind.value}: {note}" for note in run.notes]
    for line in (*notes, *left_out_lines(run.config), *run.idle, *run.unread):
        say(line, Terminal(stderr=True))
    return run.config


def start_evaluation(config: RunConfig, local: bool) -> None:
    """Answer the held-out prompts; `config` is made ready."""
    with imports_of(config):
        from megatron_rl.controller.evaluation import evaluate

    evaluate(config, local)


def startable_task(path: Path, overrides: Sequence[str] | None, task: str, local: bool, collapse: bool) -> TaskConfig:
    """Read the configuration of a task that does not generate, as `startable`, and prepare this process for it."""
    config = startable(path, overrides, task, collapse)
    assert isinstance(config, TaskConfig)  # `commanded` makes one for every task but PPO
    return made_ready(config, local)


def made_ready(run_config: Config, local: bool) -> Config:
    """Prepare this process for a run, before engines are imported."""
    if local:
        run_config = on_one_rank(run_config)
        os.environ |= worker_environment(run_config.trainer.device, ranks_per_node=1)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
            del os.environ["PYTHONBREAKPOINT"]  # Ray's own debugger, which a shell inherits from a Ray job
    # Otherwise tokenizers warns at every fork that its threads end in the child, which only renders templates.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    quiet_libraries()
    return run_config


@contextmanager
def imports_of(run_config: RunConfig) -> Iterator[None]:
    """Wrap the imports of a run's libraries, which take seconds: a signal ends this process with one line.

    The exit code is that of a run that is stopped before its first step; where it saves no checkpoints, the signal's.
    """
    Announcer(Terminal()).title("Preparing: libraries, model and data")
    quit_on_signals(StoppedBeforeStep.exit_code if run_config.trainer.save_freq > 0 else None)
    try:
        with without_collections():
            yield
    finally:
        restore_signals()


def check_replay(config: RunConfig, replay: Path) -> None:
    """Set the keys of a replay, which starts again and saves nothing.

    Raises ConfigError for a configuration without a schedule, and for the folder that is to be repeated.
    """
    trainer = config.trainer
    if trainer.rollouts_from is not None:
        raise ConfigError(
            f"--replay repeats how responses were generated, and trainer.rollouts_from={trainer.rollouts_from} makes "
            "none; try: trainer.rollouts_from=null"
        )
    if not config.samples_ahead:
        raise ConfigError(
            "--replay needs the configuration of the run that it repeats: this one has trainer.rollout_ahead=0"
        )
    if Path(trainer.default_local_dir).resolve() == replay.resolve():
        raise ConfigError(
            f"--replay {replay} would overwrite the run that it replays; try: trainer.default_local_dir={replay}_again"
        )
    trainer.save_freq, trainer.resume_mode, trainer.resume_from_path = -1, "disable", None


def on_one_rank(config: Config) -> Config:
    """Return the run in one pool of one rank. Raises ConfigError where a pool has more than one rank."""
    sizes = {name: pool.size for name, pool in Placement.of(config).pools.items()}
    larger = [f"{name} has {size.world_size} ({size})" for name, size in sizes.items() if size.world_size > 1]
    if larger:
        rule = "--local runs one rank in this process, and"
        raise ConfigError(f"{rule} {', '.join(larger)}; try: --local --collapse")
    return collapsed(config) if len(sizes) > 1 else config
