"""A generator's state survives a file."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from megatron_rl.hybrid_engine.rng import RNGState


def draw() -> tuple:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_state_goes_through_json() -> None:
    """Also in the middle of a pair of normal numbers. Would not catch a CUDA generator's state."""
    random.gauss(0, 1)
    np.random.randn()
    state = RNGState.capture()
    text = json.dumps(state.to_json())
    expected = draw()
    assert draw() != expected
    RNGState.from_json(json.loads(text)).restore()
    assert draw() == expected
