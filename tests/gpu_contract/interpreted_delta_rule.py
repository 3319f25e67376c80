"""A layer's core with flash-linear-attention's gated delta rule on a CPU, forward and backward, beside ours.

    TRITON_INTERPRET=1 PYTHONPATH=.venv/contract/triton:.venv/contract/fla python interpreted_delta_rule.py

Prints a JSON object: output, and the gradient of each input, -> the largest difference as a share of the largest value.
"""

from __future__ import annotations

import builtins
import importlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import TensorHandle

from megatron_rl.model.delta_rule import DeltaCore, HeadSizes, chunked_delta_rule
from megatron_rl.model.fused_kernels import kernel_delta_rule

NAMES = ("output", "mixed", "b", "a", "weight", "log_decay", "dt_bias")
SIZES = HeadSizes(num_keys=1, num_values=2, key=16, value=16)


def at_once(kernel: Callable[[], Any], quantiles: Any) -> list[float]:
    """Run a kernel's form, and call all equally fast: there is no driver to ask for the time."""
    kernel()
    return [1.0, 1.0, 1.0]


def counted(*ends: Any) -> Iterator[Any]:
    """A range of numbers with a dtype, as loops of compiled kernels have them."""
    for number in builtins.range(*map(int, ends)):
        yield tl.core.tensor(TensorHandle(np.array([number], np.int32), tl.int32), tl.int32)


def main() -> None:
    Autotuner.do_bench = property(lambda self: at_once, lambda self, given: None)
    importlib.import_module("fla.ops.common.chunk_delta_h").range = counted
    torch.manual_seed(0)
    channels, row = sum(SIZES.sections), (2, 70)
    shapes = ((*row, channels), (*row, 2), (*row, 2), (channels, 1, 4), (2,), (2,))
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    weights = torch.randn(*row, 2, 16)
    results = []
    for rule in (chunked_delta_rule, partial(kernel_delta_rule, dtype=torch.float32)):
        out = DeltaCore.apply(*leaves, SIZES, rule)
        results.append((out, *torch.autograd.grad(out, leaves, weights)))
    found = {
        name: float((theirs - ours).abs().max() / ours.abs().max())
        for name, ours, theirs in zip(NAMES, *results, strict=True)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
