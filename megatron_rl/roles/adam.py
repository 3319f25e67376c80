"""Megatron's distributed Adam on one rank: its configuration, and the state of this rank's share on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_rl.config.megatron import OptimConfig
from megatron_rl.roles.orthogonal import MOMENTUM

if TYPE_CHECKING:
    from megatron_rl.roles.muon import ShardedMuon

FIRST_LOSS_SCALE = 2**16
"""Where the scale of a float16 loss starts. Megatron's 2^32 costs sixteen skipped steps, more than a run allows."""
MOMENTS = ("exp_avg", "exp_avg_sq")
KEPT = (*MOMENTS, MOMENTUM)


def optimizer_config(optim: OptimConfig, config: Any) -> OptimizerConfig:
    """Megatron's Adam configuration. clip_grad = 0 switches clipping off."""
    override = optim.override_optimizer_config
    offloads = override.optimizer_cpu_offload
    found = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=config.bf16,
        fp16=config.fp16,
        initial_loss_scale=FIRST_LOSS_SCALE,
        hysteresis=1,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=offloads,
        optimizer_offload_fraction=override.optimizer_offload_fraction if offloads else 0.0,
        overlap_cpu_optimizer_d2h_h2d=override.overlap_cpu_optimizer_d2h_h2d and offloads,
    )
    if offloads and config.params_dtype != torch.float32:
        # Otherwise the masters of 16-bit weights stay on the device, and the host has copies of them. The constructor
        # compares transformer-engine's version before it sees that this needs none, and fails without one.
        found.use_precision_aware_optimizer = found.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return found


def use_fused_kernels(optimizer: Any) -> None:
    """Let torch's Adam update parameters on a GPU in one kernel, without a copy of the shard.

    optimizer: Megatron's. transformer-engine's and apex's are fused already.
    """
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        for adam in inner.sub_optimizers if isinstance(inner, HybridDeviceOptimizer) else [inner]:
            groups = adam.param_groups if isinstance(adam, torch.optim.Adam) else []
            for group in groups:
                if all(parameter.is_cuda for parameter in group["params"]):
                    group.update(fused=True, foreach=False)


class AdamState:
    """The state of this rank's share of the parameters, over Megatron's distributed optimizers."""

    def __init__(self, optimizer: Any) -> None:
        """`optimizer`: Megatron's, of which dense layers and experts have one part each."""
        self._parts = optimizer.chained_optimizers
        self.muon: Sequence[ShardedMuon] = ()
        """Muon optimizers of the layers' matrices, which Adam passes over."""

    def since_first_step(self) -> list[torch.Tensor]:
        """Tensors that the first step makes: both moments of every parameter, and copies of gradients on the host."""
        tensors = []
        for part in self._parts:
            states = part.optimizer.state.values()
            tensors += [state[name] for state in states for name in KEPT if name in state]
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                tensors += part.optimizer.cpu_copy_map_grad.values()
        return tensors

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the optimizer's state; some several times. Includes parameters that are their own masters."""
        tensors = self.since_first_step()
        for part in self._parts:
            inner = part.optimizer
            tensors += [main for group in inner.param_groups for main in group["params"]]
            tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
            if isinstance(inner, HybridDeviceOptimizer):
                tensors += [*inner.gpu_params_map_cpu_copy.values(), *inner.param_to_fp32_param.values()]
        return tensors

    def runs(self) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
        """Yield (parameter, first element, state) for each run of a flattened shard that this rank updates.

        The state holds "param" [n], the float32 master, and once there are moments those of KEPT [n] that it has.
        """
        for part in self._parts:
            for by_dtype in part.gbuf_ranges:
                for buckets in by_dtype.values():
                    for bucket in buckets:
                        for parameter, ranges in bucket["param_map"].items():
                            state = part._get_main_param_and_optimizer_states(parameter)
                            yield parameter, ranges["param"].start, state

    def create(self) -> None:
        """Make the moments that Adam and Muon would make at their first step, unless they exist."""
        for muon in self.muon:
            muon.create()
        for part in self._parts:
            inner = part.optimizer
            if isinstance(inner, HybridDeviceOptimizer):
                for optimizer in inner.sub_optimizers:
                    create_moments(optimizer)
                inner._sync_sub_optimizers_state_to_hdo()
            else:
                part.init_state_fn(inner, part.config)
        if not self.step:
            self.set_step(0)

    @property
    def step(self) -> int:
        """Adam's step count; torch's Adam keeps it with every parameter, fused ones with a group."""
        for inner in self._updating():
            for holder in (*inner.state.values(), *inner.param_groups):
                if "step" in holder:
                    return int(holder["step"])
        return 0

    def set_step(self, step: int) -> None:
        """Set Adam's step count."""
        for inner in self._updating():
            if isinstance(inner, torch.optim.Adam):
                for group in inner.param_groups:
                    for parameter in set(group["params"]) & inner.state.keys():
                        # A fused kernel reads the number where the parameter is.
                        device = parameter.device if group["fused"] else None
                        inner.state[parameter]["step"] = torch.tensor(float(step), device=device)
            else:
                for group in inner.param_groups:
                    group["step"] = step

    def take_weights(self) -> None:
        """Copy the weights on the device to the copies that are updated on the host.

        Copies of 16-bit weights are masters, which a checkpoint holds itself.
        """
        for part in self._parts:
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                for weight, copy in part.optimizer.gpu_params_map_cpu_copy.items():
                    if weight.dtype == copy.dtype:
                        copy.data.copy_(weight.data)

    def _updating(self) -> Iterator[torch.optim.Optimizer]:
        """The optimizers that update: for an offloaded part those of device and host."""
        for part in self._parts:
            inner = part.optimizer
            yield from inner.sub_optimizers if isinstance(inner, HybridDeviceOptimizer) else [inner]


def create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zeroed moments for every parameter that has none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {name: torch.zeros_like(parameter.data) for name in MOMENTS}
