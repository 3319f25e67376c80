"""Training and generation each keep their own random state; neither sees how many numbers the other drew."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class RNGState:
    """Every global generator of a process: Python's, numpy's, torch's on the CPU and on the CUDA devices in use."""

    python: object
    numpy: dict
    torch_cpu: torch.Tensor
    torch_cuda: list[torch.Tensor]

    @classmethod
    def capture(cls) -> RNGState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(self.torch_cuda)


def swap(incoming: RNGState | None) -> RNGState:
    """Put `incoming` in place (None: leave the state as it is) and return what was there."""
    outgoing = RNGState.capture()
    if incoming is not None:
        incoming.restore()
    return outgoing
