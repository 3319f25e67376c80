"""The errors that a user can cause or must know about, each with its process exit code.

Every message prints the values, the rule they break and what to change.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Violation:
    """One broken rule as data; its text is made from it.

    settings: key -> value of what breaks the rule: dotted keys of the configuration, or keys of the JSON file `file`.
    rule: what must hold, as the predicate of a sentence about the settings.
    nearest: key -> value that satisfies the rule; empty: there is no such value.
    hint: further advice. subject: the subject of the sentence; empty: key=value, or the file's key=value.
    wrong_name: a key, value or path that does not exist; `nearest` is the one that was probably meant.
    feature: the row of the table of features that says so; "" for a rule of its own.
    """

    settings: dict[str, Any]
    rule: str
    nearest: dict[str, Any] = field(default_factory=dict)
    hint: str = ""
    file: str | None = None
    subject: str = ""
    wrong_name: bool = False
    feature: str = ""

    def __str__(self) -> str:
        write = json.dumps if self.file else shown
        named = " and ".join(f"{key}={write(value)}" for key, value in self.settings.items())
        subject = self.subject or (f"{named} of {self.file}" if self.file else named)
        text = f"{subject} {self.rule}" if subject else self.rule
        changes = [f"{key}={write(value)}" for key, value in self.nearest.items()]
        if not self.subject and len(self.settings) == 1 and [*self.nearest] == [*self.settings]:
            changes = [write(value) for value in self.nearest.values()]
        lead = "did you mean" if self.wrong_name else "try"
        ends = [f"{lead}: {' '.join(changes)}"] if changes else []
        return "; ".join([text, *ends, *([self.hint] if self.hint else [])])

    def as_json(self) -> dict[str, Any]:
        """Everything a program needs to act on it, and the text for people."""
        return {
            "settings": self.settings,
            "file": self.file,
            "rule": self.rule,
            "nearest": self.nearest,
            "hint": self.hint,
            "text": str(self),
        } | ({"feature": self.feature} if self.feature else {})


def shown(value: Any) -> str:
    """A value in the form of an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


class MegatronRLError(Exception):
    """Base of all errors this package raises on purpose; `exit_code` is what the command line exits with."""

    exit_code = 1


class ConfigError(MegatronRLError):
    """The configuration, a file that it names, or the nodes cannot work. Raised before any role is built.

    violations: the broken rules as data, if rules were checked. is_shortage: nodes have no room for the ranks.
    """

    exit_code = 2

    def __init__(self, message: str, violations: Sequence[Violation] = (), is_shortage: bool = False) -> None:
        super().__init__(message)
        self.violations = tuple(violations)
        self.is_shortage = is_shortage


@dataclass(frozen=True)
class DeviceFault:
    """A fault that a GPU reported. kind: its words. is_certain: no error of code can cause it.

    node: the launcher's name of the GPU's node; host: its address. gpu: in the form of CUDA_VISIBLE_DEVICES; "" if it
    is not known.
    """

    kind: str
    is_certain: bool
    node: str = ""
    host: str = ""
    gpu: str = ""

    @property
    def where(self) -> str:
        """The GPU in messages."""
        return f"GPU {self.gpu or 'of unknown number'} of node {self.host}"


class WorkerFailure(MegatronRLError):
    """A worker raised, or its process died. The message names rank, role, method and the worker's traceback.

    is_loss: a process, node or GPU was lost or hung, so that the same step may go well with others. device_fault: what
    its GPU reported.
    """

    exit_code = 3

    def __init__(self, message: str = "", is_loss: bool = False) -> None:
        super().__init__(message)
        self.is_loss = is_loss
        self.device_fault: DeviceFault | None = None


class WorkerStall(WorkerFailure):
    """A worker stopped answering, or its method made no progress; message and note say where it was."""

    def __init__(self, message: str = "", is_loss: bool = True) -> None:
        super().__init__(message, is_loss)


class CopyLost(WorkerFailure):
    """The copies of the state in host memory do not make up the state."""


class RewardError(MegatronRLError):
    """The reward function scored none of a step's samples or cannot be called any more, or a reward model gives NaN or
    cannot read a conversation.
    """

    exit_code = 4


class ParityError(MegatronRLError):
    """Two computations that must agree (rollout and trainer, export and trainer) differ beyond their bound."""

    exit_code = 5


class NonFiniteUpdates(MegatronRLError):
    """More updates in a row than allowed had a gradient or a loss that is not finite; none of them was taken."""

    exit_code = 6


class ReplayError(MegatronRLError):
    """A recorded schedule cannot be replayed, or the run differs from it."""


class StorageError(MegatronRLError):
    """Files could not be written: the disk is full, read-only or broken, or a folder has gone."""

    exit_code = 7


class StoppedAfterStep(MegatronRLError):
    """A signal asked the run to stop; the step it was in is finished and saved."""

    exit_code = 20


class StoppedBeforeStep(MegatronRLError):
    """A signal asked the run to stop; the step it was in was given up, and the state before it is saved."""

    exit_code = 21


class GracePeriodExpired(MegatronRLError):
    """A signal asked the run to stop, and it could not save in the time it had; the last complete checkpoint stands."""

    exit_code = 22
