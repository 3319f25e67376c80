"""Training and generation each keep their own random state; neither sees how many numbers the other drew."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.device import rng_states, set_rng_states


@dataclass
class RNGState:
    """Every global generator of a process: Python's, numpy's, torch's on the CPU and on the CUDA devices in use."""

    python_state: tuple
    numpy_state: dict
    torch_states: list[torch.Tensor]

    @classmethod
    def capture(cls) -> RNGState:
        return cls(random.getstate(), np.random.get_state(legacy=False), rng_states())

    def restore(self) -> None:
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)
        set_rng_states(self.torch_states)


def swap(incoming: RNGState | None) -> RNGState:
    """Put `incoming` in place (None: leave the state as it is) and return what was there."""
    outgoing = RNGState.capture()
    if incoming is not None:
        incoming.restore()
    return outgoing
