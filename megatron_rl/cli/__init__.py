"""The command line: megatron-rl init | sft | reward | dpo | train | eval | generate | plan | map | profile |
rehearse | check-cluster | doctor | columns | families | ablate | view | explain | export | average | nightly | port.

Configuration mistakes are reported before torch, Ray or vLLM is imported; exit codes are those of `errors.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from rich.text import Text

from megatron_rl.cli.checking import check_cluster_command, doctor_command
from megatron_rl.cli.evaluating import eval_command, generate_command
from megatron_rl.cli.families import families_command
from megatron_rl.cli.models import average_command, export_command
from megatron_rl.cli.planning import columns_command, map_command, plan_command, profile_command
from megatron_rl.cli.porting import port_command
from megatron_rl.cli.rehearsing import rehearse_command
from megatron_rl.cli.starting import init_command
from megatron_rl.cli.tasks import dpo_command, reward_command, sft_command, train_command
from megatron_rl.cli.trials import ablate_command, nightly_command
from megatron_rl.cli.viewing import explain_command, view_command
from megatron_rl.cluster.compiled import leaving_none_empty
from megatron_rl.cluster.signals import quit_on_signals, restore_signals
from megatron_rl.errors import ConfigError, MegatronRLError, StorageError
from megatron_rl.observe.console import drop_unread_output
from megatron_rl.observe.terminal import Terminal

RUNS = {"train": train_command, "sft": sft_command, "reward": reward_command, "dpo": dpo_command}
"""Commands that start a run."""

app = typer.Typer(
    help="PPO with Megatron training and vLLM generation on one memory.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.command("init")(init_command)
for name, run_command in RUNS.items():
    app.command(name)(run_command)
app.command("eval")(eval_command)
app.command("generate")(generate_command)
app.command("port", context_settings={"ignore_unknown_options": True})(port_command)
app.command("plan")(plan_command)
app.command("map")(map_command)
app.command("profile")(profile_command)
app.command("rehearse")(rehearse_command)
app.command("check-cluster")(check_cluster_command)
app.command("doctor")(doctor_command)
app.command("columns")(columns_command)
app.command("families")(families_command)
app.command("view")(view_command)
app.command("explain")(explain_command)
app.command("export")(export_command)
app.command("average")(average_command)
app.command("nightly")(nightly_command)
app.command("ablate")(ablate_command)


def refuse_hydra_options(arguments: Sequence[str]) -> None:
    """Raise ConfigError for Hydra's names of configuration files, which `port` alone reads; says what to do."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in ("--config-path", "--config-name", "--config-dir") and arguments[0] != "port":
            rule = "is Hydra's, and no file of verl's is read here: its values are verl's defaults"
            raise ConfigError(f"{name} {rule}; try: --config FILE.yaml, made by megatron-rl port SCRIPT.sh")


def print_error(error: MegatronRLError) -> None:
    """Print an error that is meant for the user, without a traceback."""
    message = Text.assemble((type(error).__name__, "bold red"), f": {error}")
    Terminal(stderr=True).print(message, soft_wrap=True, highlight=False)


def main() -> None:
    """Run the command line; an error we raise on purpose becomes one message and its exit code, without a traceback.

    Until a run's libraries are imported, a signal ends it at once.
    """
    drop_unread_output()
    if sys.argv[1:2] and sys.argv[1] in RUNS:
        quit_on_signals()
    else:
        restore_signals()
    try:
        refuse_hydra_options(sys.argv[1:])
        with leaving_none_empty():
            app(prog_name="megatron-rl")
    except MegatronRLError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None or sys.argv[1] in RUNS:
            raise
        storage = StorageError(f"{error.filename} cannot be used, and the system says: {error.strerror}")
        print_error(storage)
        sys.exit(storage.exit_code)
    finally:
        restore_signals()
