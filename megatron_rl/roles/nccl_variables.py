"""Variables of torch's NCCL groups as one choice: one of them can undo what another one protects.

As torch 2.13 has it (`ProcessGroupNCCL`): the watchdog of a group that lost a peer sets a flag of the whole process,
whatever `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` says for that group. The monitor of the world's own group sees the flag if
it may dump, writes the record of calls, sleeps eight minutes and aborts the process, unless monitoring is off.
`TORCH_NCCL_DESYNC_DEBUG` and `TORCH_DISTRIBUTED_DEBUG=DETAIL` turn error handling on again. With
`TORCH_NCCL_BLOCKING_WAIT` there is neither watchdog nor monitor, and no record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_rl.errors import ConfigError

ERROR_HANDLING, BLOCKING_WAIT = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"
DUMP, MONITORING, NUM_RECORDED = (
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
)
DESYNC_DEBUG, DEBUG_LEVEL = "TORCH_NCCL_DESYNC_DEBUG", "TORCH_DISTRIBUTED_DEBUG"
OLD_NAMES = {DESYNC_DEBUG: "NCCL_DESYNC_DEBUG", BLOCKING_WAIT: "NCCL_BLOCKING_WAIT"}
"""Names that torch reads where the newer one is not set."""
FLAGS = {DUMP: True, MONITORING: True, DESYNC_DEBUG: False, BLOCKING_WAIT: False}
"""Variables that are true or false -> torch's default."""
TRUE, FALSE = ("y", "yes", "1", "t", "true"), ("n", "no", "0", "f", "false")
"""Values that torch takes, in any case; it raises at any other."""
FLIGHT_RECORDER = {DUMP: "1", NUM_RECORDED: "2000"}
"""torch's record of NCCL's calls: written at a time-out, with that many calls."""


@dataclass(frozen=True)
class Defeat:
    """A combination of variables by which the loss of a replica ends the trainer. remedy: what to set instead."""

    holds: Callable[[Mapping[str, str]], bool]
    names: tuple[str, ...]
    remedy: str


DEFEATS = (
    Defeat(lambda given: flag(given, DUMP) and flag(given, MONITORING), (DUMP, MONITORING), f"{MONITORING}=0"),
    Defeat(lambda given: flag(given, DESYNC_DEBUG), (DESYNC_DEBUG,), f"{DESYNC_DEBUG}=0"),
    Defeat(lambda given: given.get(DEBUG_LEVEL, "").upper() == "DETAIL", (DEBUG_LEVEL,), f"{DEBUG_LEVEL}=INFO"),
)


def nccl_variables(given: Mapping[str, str], survives_losses: bool) -> dict[str, str]:
    """Return the variables of torch's NCCL groups that every rank has. given: the user's, which stay.

    survives_losses: the trainer lives on when a replica is lost in a weight transfer. Then the record is written but
    ends no process; hung ranks are found by their heartbeats. Raises ConfigError for a value that torch would not take
    and for `DEFEATS` that the user has set himself.
    """
    variables = {name: given.get(name, value) for name, value in FLIGHT_RECORDER.items()}
    if not survives_losses:
        return variables
    if flag(given, MONITORING, default=False) and DUMP not in given:
        variables[DUMP] = "0"
    quiet = {MONITORING: "0", DESYNC_DEBUG: given.get(OLD_NAMES[DESYNC_DEBUG], "0"), DEBUG_LEVEL: "OFF"}
    variables |= {name: given.get(name, value) for name, value in quiet.items()}
    if found := defeats({**given, **variables}):
        said = ", ".join(f"{name}={variables[name]}" for defeat in found for name in defeat.names)
        raise ConfigError(
            f"{said}: with this, torch ends the trainer minutes after a rollout replica was lost, although the run "
            f"could continue; try: {', '.join(defeat.remedy for defeat in found)}"
        )
    return variables


def defeats(variables: Mapping[str, str]) -> list[Defeat]:
    """Return what ends a trainer with these variables after a replica was lost. Raises ConfigError as `flag`."""
    return [] if flag(variables, BLOCKING_WAIT) else [defeat for defeat in DEFEATS if defeat.holds(variables)]


def flag(variables: Mapping[str, str], name: str, default: bool | None = None) -> bool:
    """Return what torch reads of a variable that is true or false, and of its old name. default: else torch's.

    Raises ConfigError where torch raises.
    """
    for known in (name, OLD_NAMES.get(name, name)):
        if known in variables:
            value = variables[known].lower()
            if value not in TRUE + FALSE:
                raise ConfigError(f"{known}={variables[known]} must be 0 or 1 for torch; try: unset {known}")
            return value in TRUE
    return FLAGS[name] if default is None else default
