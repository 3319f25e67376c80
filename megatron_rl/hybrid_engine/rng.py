"""Separate random states of training and generation, independent of how many numbers the other draws."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_rl.device import rng_states, set_rng_states


@dataclass
class RNGState:
    """Every global generator of a process: Python's, numpy's, torch's on the CPU and on the CUDA devices in use."""

    python_state: tuple[Any, ...]
    numpy_state: dict[str, Any]
    torch_states: list[torch.Tensor]

    @classmethod
    def capture(cls) -> RNGState:
        return cls(random.getstate(), np.random.get_state(legacy=False), rng_states())

    def restore(self) -> None:
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)
        set_rng_states(self.torch_states)

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values."""
        version, words, gauss = self.python_state
        inner = self.numpy_state["state"]
        return {
            "python": [version, list(words), gauss],
            "numpy": {**self.numpy_state, "state": {**inner, "key": inner["key"].tolist()}},
            "torch": [to_hex(state) for state in self.torch_states],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RNGState:
        """The state from the values of `to_json`, also after a round trip through a file."""
        version, words, gauss = content["python"]
        inner = content["numpy"]["state"]
        key = np.array(inner["key"], dtype=np.uint32)
        return cls(
            (version, tuple(words), gauss),
            {**content["numpy"], "state": {**inner, "key": key}},
            [from_hex(text) for text in content["torch"]],
        )


def to_hex(state: torch.Tensor) -> str:
    """A generator's state, uint8 [n], as text."""
    return state.numpy().tobytes().hex()


def from_hex(text: str) -> torch.Tensor:
    """The inverse of `to_hex`."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def swap(incoming: RNGState | None) -> RNGState:
    """Set the random state to `incoming` (None: leave it unchanged) and return the previous one."""
    outgoing = RNGState.capture()
    if incoming is not None:
        incoming.restore()
    return outgoing
