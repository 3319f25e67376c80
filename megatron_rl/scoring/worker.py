"""A process that calls the reward function, sample by sample, and may be killed at any moment while it does."""

from __future__ import annotations

import ctypes
import os
import signal
from multiprocessing.connection import Connection

from megatron_rl.errors import ConfigError
from megatron_rl.scoring.function import RewardSource, load_reward_function
from megatron_rl.scoring.outcome import score_sample
from megatron_rl.scoring.wire import READY, send

PR_SET_PDEATHSIG = 1


def work(connection: Connection, source: RewardSource, keeper_pid: int) -> None:
    """Load the function, send READY (or, where that fails, why), then answer lists of (row, Sample), one by one.

    Returns when the connection ends. The kernel kills this process when its keeper dies.
    """
    os.setsid()  # what the function starts is in this group, and ends with it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper_pid:
        return  # it died before the kernel was told
    for number in (signal.SIGTERM, signal.SIGINT):  # the keeper's are not for the function's own children
        signal.signal(number, signal.SIG_DFL)
    try:
        function = load_reward_function(source)
    except ConfigError as error:
        send(connection, str(error))
        return
    send(connection, READY)
    while True:
        try:
            chunk = connection.recv()
        except EOFError:
            return
        for row, sample in chunk:
            send(connection, (row, score_sample(function, sample)))
