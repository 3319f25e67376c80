"""Three updates by Megatron's optimizer in float32: gradient norms are those of a CPU; repeated, are they bitwise?"""

from __future__ import annotations

from typing import Any

import step_outcome
import torch
from models import hidden_states, join_world, padded, random_rows, save, trainer_model

ON_CPU = [8.98860, 6.04879, 4.48264]
"""Gradient norms of the same updates, seen on a CPU with torch 2.13 and megatron-core 0.16.1."""
TOLERANCE = 2e-3


def norms(folder: Any, device: str, groups: Any) -> list[float]:
    """Gradient norms of three updates from the folder's weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_rl.model.decoder import head_weight
    from megatron_rl.model.log_probs import VocabSoftmax, head_log_probs

    model = trainer_model(folder, "float32", device, groups)
    generator = torch.Generator().manual_seed(0)  # transformers' own first weights differ from version to version
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.1 * noise)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunk = DistributedDataParallel(model.config, ddp, model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-3,
        clip_grad=1.0,
        params_dtype=torch.float32,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(settings, [chunk], use_gloo_process_groups=False)
    rows = padded(random_rows([20, 20, 20], device))
    found = []
    for _ in range(3):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        hidden = hidden_states(chunk, rows)[:, :-1].flatten(0, 1)
        log_probs, _ = head_log_probs(
            hidden, head_weight(model), rows[:, 1:].flatten(), VocabSoftmax(70, 1.0, groups.tp_group)
        )
        (-log_probs.mean()).backward()
        chunk.finish_grad_sync()
        _, norm, _ = optimizer.step()
        found.append(float(norm))
    return found


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Norms, and whether a second run gives the very same ones."""
    groups, folder = join_world(device), save("Llama")
    figures["gradient norms"] = norms(folder, device, groups)
    figures["on a CPU"] = ON_CPU
    again = norms(folder, device, groups)
    figures["bitwise again"] = again == figures["gradient norms"]
    for found, expected in zip(figures["gradient norms"], ON_CPU, strict=True):
        assert abs(found - expected) < TOLERANCE * expected, f"{found} against {expected}"


if __name__ == "__main__":
    step_outcome.main(run)
