"""Multiply with oneDNN in the forward pass of megatron-core's linears on CPUs.

Reason: torch multiplies float32 matrices with MKL, which on processors that are not Intel's reaches less of their peak:
70 to 97 GFLOPS of a core for these shapes, against 95 to 106.
What it does: where the linears of tensor parallelism call `torch.matmul`, float32 goes to the oneDNN kernel that the
rollout's linears use, too. Results differ in the last bits.
"""

from __future__ import annotations

import importlib

import torch

from third_party_patches.guard import Patch
from third_party_patches.megatron_core.cpu_torch import ModuleProxy

LAYERS = "megatron.core.tensor_parallel.layers"


def matmul(x: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., k] times a matrix [k, n]; everything that oneDNN's kernel cannot do goes to torch's own.

    That kernel has no gradient: callers in an autograd function's forward, which records none, get it.
    """
    plain = out is not None or torch.is_grad_enabled() or other.dim() != 2
    if plain or x.dtype != torch.float32 or other.dtype != torch.float32:
        return torch.matmul(x, other, out=out)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, other.t(), None, "none", [], "")
    return product


def apply() -> None:
    """Give the module another `torch.matmul`; a second call changes nothing."""
    layers = importlib.import_module(LAYERS)
    seen = vars(layers)["torch"]
    if vars(seen).get("matmul") is not matmul:
        vars(layers)["torch"] = ModuleProxy(seen, {"matmul": matmul})


PATCH = Patch(
    name="megatron_core.cpu_matmul",
    distributions=("megatron-core",),
    versions=">=0.16.1,<0.17",
    drop_when="torch multiplies float32 matrices with oneDNN, or as fast, on every CPU",
    apply=apply,
)
