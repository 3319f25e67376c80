"""Which form of torch's Adam updates parameters, and that fused and plain forms agree; no processes."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_rl.roles.adam import AdamState, use_fused_kernels


class OnGpu(torch.nn.Parameter):
    """A parameter on the CPU, where torch has a fused form, too, that says that it is on a GPU."""

    is_cuda = True


def optimizer_of(kind: type[torch.nn.Parameter]) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)
    parameters = [kind(torch.randn(5, 3, generator=generator)), kind(torch.randn(7, generator=generator))]
    adam = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.01, eps=1e-8)
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)])


def updated(kind: type[torch.nn.Parameter], steps: int = 3) -> tuple[bool, list[torch.Tensor], int]:
    """Whether the form is fused, the parameters after some steps with given gradients, and Adam's step."""
    optimizer = optimizer_of(kind)
    use_fused_kernels(optimizer)
    adam = optimizer.chained_optimizers[0].optimizer
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in adam.param_groups[0]["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        adam.step()
    parameters = [parameter.detach().as_subclass(torch.Tensor) for parameter in adam.param_groups[0]["params"]]
    return bool(adam.param_groups[0]["fused"]), parameters, AdamState(optimizer).step


def test_updates_on_a_gpu_are_fused_and_the_same():
    """Three steps, 1e-6 relative. Would not catch a GPU's kernel that rounds otherwise."""
    (plain, expected, steps), (fused, found, fused_steps) = updated(torch.nn.Parameter), updated(OnGpu)
    assert (plain, fused) == (False, True) and steps == fused_steps == 3
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_other_optimizers_are_left_alone():
    """transformer-engine's and apex's Adam are no torch.optim.Adam. Would not catch one that is."""
    groups = [{"params": [OnGpu(torch.zeros(2))]}]
    use_fused_kernels(
        SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups))])
    )
    assert set(groups[0]) == {"params"}
