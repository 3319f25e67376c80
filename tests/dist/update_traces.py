"""What an update leaves behind: every tensor of a trained model and its optimizer, and gradients that are cleared."""

from __future__ import annotations

import torch


def everything(trainable) -> list[torch.Tensor]:
    """Weights, moments, and where schedule and Adam stand."""
    params = [buffer.param_data.clone() for buffer in trainable.param_buffers]
    moments = [tensor.clone() for tensor in trainable.optimizer_state()]
    return [*params, *moments, torch.tensor([trainable.scheduler.num_steps, trainable.adam.step])]


def bit_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def clear(trainable) -> bool:
    return not any(buffer.grad_data.any() for buffer in trainable.param_buffers)
