"""Let modules and optimizers treat fake tensors on cuda as they treat tensors on a GPU.

Reason: torch handles fake tensors apart where a rank's own code must not notice them. `Module.to` replaces parameters,
so that Megatron's marks on them are lost; `torch.tensor` of a list of tensors reads them below the dispatcher, and
`tolist` reads number by number; foreach optimizers do not take them; the fused RMS norm falls apart into ten
operations, whose memory a GPU never needs; a copied constant would initialise the device.
What it does: one change for each. For a process of its own that rehearses: nothing is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from third_party_patches.guard import TORCH, Patch


def apply() -> None:
    """Make all changes."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    setattr(FakeTensorMode, "avoid_device_init", property(lambda mode: True))  # noqa: B010  mypy: read-only
    for supported in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if FakeTensor not in supported:
            supported.append(FakeTensor)
    _keep_marks()
    _read_lists()
    _fuse_norms()


def _keep_marks() -> None:
    import torch

    moved: dict[int, tuple[Any, Any]] = {}  # keeps the old parameter alive, whose id is the key

    def of_device(function: Callable[[Any], Any], parameter: Any) -> Any:
        if id(parameter) not in moved:
            with torch.no_grad():
                new = torch.nn.Parameter(function(parameter), parameter.requires_grad)
            for name, value in vars(parameter).items():
                setattr(new, name, value)
            moved[id(parameter)] = parameter, new
        return moved[id(parameter)][1]

    def _apply(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
        for child in module.children():
            child._apply(function)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = of_device(function, parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    setattr(torch.nn.Module, "_apply", _apply)  # noqa: B010  mypy: it is a method


def _read_lists() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_map

    make = torch.tensor

    def number_of(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value

    def tensor(data: Any, *args: Any, **options: Any) -> Any:
        read = tree_map(number_of, data) if isinstance(data, (list, tuple)) else data
        # Made on the CPU, then copied. A setting of each thread, and one of autograd's own recomputes.
        torch._C._set_only_lift_cpu_tensors(True)
        return make(read, *args, **options)

    vars(torch)["tensor"] = tensor
    # Copied once, as on a GPU; torch's own goes number by number.
    setattr(FakeTensor, "tolist", lambda fake: fake.cpu().tolist())  # noqa: B010  mypy: it is a method


def _fuse_norms() -> None:
    import torch

    plain = torch.nn.functional.rms_norm

    class FusedNorm(torch.autograd.Function):
        """The memory of the fused kernel: it keeps its input and one number a row. Values mean nothing here."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, weight, _ = ctx.saved_tensors
            return torch.empty_like(x), torch.empty_like(weight)

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        if x.device.type != "cuda" or weight is None:
            return plain(x, shape, weight, eps)
        return FusedNorm.apply(x, weight)

    vars(torch.nn.functional)["rms_norm"] = rms_norm


PATCH = Patch(TORCH, apply, drop_when="torch's fake tensors are moved, read and fused as tensors of their device are")
