"""A driver whose every call goes through Ray's daemon of this machine: it puts objects until it is ended."""

import sys

import numpy as np
import ray

from megatron_rl.cluster.ray_session import RaySession
from megatron_rl.cluster.signals import graceful_signals
from megatron_rl.errors import MegatronRLError

if __name__ == "__main__":
    try:
        with graceful_signals(600.0), RaySession(1):
            while True:
                ray.get(ray.put(np.zeros(1 << 18)))
    except MegatronRLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
