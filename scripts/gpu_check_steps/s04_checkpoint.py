"""Save, load, and the random state: weights bit for bit, and the numbers that would have been drawn next."""

from __future__ import annotations

import tempfile
from typing import Any

import step_outcome
import torch
from models import join_world, save, trainer_model


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Through megatron-core's sharded files, and torch's generators."""
    from megatron.core import dist_checkpointing

    from megatron_rl.device import Device, rng_states, set_rng_states

    groups, where = join_world(device), Device(device).torch_device
    model = trainer_model(save("Llama"), "float32", device, groups)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    folder = tempfile.mkdtemp(prefix="gpu_check_")
    dist_checkpointing.save(model.sharded_state_dict(), folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        loaded = dist_checkpointing.load(model.sharded_state_dict(), folder)
        model.load_state_dict(loaded, strict=False)
    wrong = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    figures["parameters"] = len(before)
    assert not wrong, f"not as saved: {wrong}"
    states = rng_states()
    drawn = torch.rand(5, device=where)
    set_rng_states(states)
    figures["random state"] = torch.equal(torch.rand(5, device=where), drawn)
    assert figures["random state"]


if __name__ == "__main__":
    step_outcome.main(run)
