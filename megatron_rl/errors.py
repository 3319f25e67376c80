"""The errors a user can cause or must be told about, each with its process exit code.

Every message prints the values, the rule they break and the nearest valid choice.
"""


class MegatronRLError(Exception):
    """Base of all errors this package raises on purpose; `exit_code` is what the command line exits with."""

    exit_code = 1


class ConfigError(MegatronRLError):
    """The configuration, or a file it names, cannot work. Raised before any process is started."""

    exit_code = 2


class WorkerFailure(MegatronRLError):
    """A worker raised, or its process died. The message names rank, role, method and the worker's traceback."""

    exit_code = 3


class RewardError(MegatronRLError):
    """The user's reward function scored none of a step's samples, or can no longer be called at all."""

    exit_code = 4


class ParityError(MegatronRLError):
    """Two computations that must agree (rollout and trainer, export and trainer) differ beyond their bound."""

    exit_code = 5


class NonFiniteUpdates(MegatronRLError):
    """More updates in a row than allowed had a gradient or a loss that is not finite; none of them was taken."""

    exit_code = 6


class StoppedAfterStep(MegatronRLError):
    """A signal asked the run to stop; the step it was in is finished and saved."""

    exit_code = 20


class StoppedBeforeStep(MegatronRLError):
    """A signal asked the run to stop; the step it was in was given up, and the state before it is saved."""

    exit_code = 21


class GraceOver(MegatronRLError):
    """A signal asked the run to stop, and it could not save in the time it had; the last complete checkpoint stands."""

    exit_code = 22
