"""Let megatron-core's optimizer that keeps its state on the host run on a CPU.

Reason: `HybridDeviceOptimizer` takes every parameter in host memory for one of its own copies of device parameters.
Without a device all parameters are in host memory, and the first step ends in a KeyError.
What it does: the optimizer's parameters count as device parameters, whatever memory they are in. As many of them are
copied, and updated in their copies, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from third_party_patches.guard import MEGATRON, Patch

Groups = list[dict[str, Any]]
TensorMap = dict[torch.Tensor, torch.Tensor]


def divided(self: Any, offload_fraction: float) -> tuple[Groups, Groups, TensorMap, TensorMap, TensorMap]:
    """Return (groups of the host, groups of the device, parameter -> copy, copy -> parameter, parameter -> master)."""
    wanted = offload_fraction * sum(parameter.numel() for group in self.param_groups for parameter in group["params"])
    host, device, taken = Groups(), Groups(), 0
    copies, masters = TensorMap(), TensorMap()
    for group in self.param_groups:
        on_host, on_device = [], []
        for parameter in group["params"]:
            updated = parameter
            if taken < wanted:
                taken += parameter.numel()
                updated = copies[parameter] = parameter.detach().clone()
            if self.param_update_in_fp32 and parameter.dtype != torch.float32:
                updated = masters[parameter] = parameter.detach().float()
            if parameter in copies:
                copies[parameter] = updated
                on_host.append(updated)
            else:
                on_device.append(updated)
        for groups, parameters in ((host, on_host), (device, on_device)):
            if parameters:
                groups.append({**group, "params": parameters})
    return host, device, copies, {copy: parameter for parameter, copy in copies.items()}, masters


def apply() -> None:
    """Replace the method that divides the parameters."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    hybrid: Any = HybridDeviceOptimizer
    hybrid._get_sub_optimizer_param_groups = divided


PATCH = Patch(
    MEGATRON,
    apply,
    drop_when="HybridDeviceOptimizer tells its copies from the parameters by something else than Tensor.is_cuda",
)
