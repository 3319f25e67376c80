"""Let megatron-core's RNG tracker keep CPU generator states.

Reason: `_get_cuda_rng_state` and `_set_cuda_rng_state` read and write CUDA generators through private bindings that
need an initialised CUDA context. Without one, setting is silently put off, so the tracker's seeds stay behind in the
process's own generator, and forking and recomputing activations, which restores states, fail.
What it does: both use the CPU's default generator.
"""

from __future__ import annotations

import torch

from third_party_patches.guard import MEGATRON, Patch


def get_state(device: object = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    """The default CPU generator's state; the arguments mirror megatron-core's and have no meaning here."""
    return torch.get_rng_state()


def set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    """Set the default CPU generator's state."""
    torch.set_rng_state(new_state)


def apply() -> None:
    """Replace the two functions in `megatron.core.tensor_parallel.random`."""
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


PATCH = Patch(MEGATRON, apply, drop_when="megatron-core's RNG tracker takes a generator instead of a CUDA device")
