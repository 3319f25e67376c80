"""One bfloat16 update of a model of a billion parameters, packed and padded: seconds and peak memory."""

from __future__ import annotations

from typing import Any

import step_outcome
import torch
from models import BILLION, hidden_states, join_world, padded, random_rows, save, trainer_model


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Forward and backward, three times each way; the best of the last two. On a CPU of a tiny model."""
    from megatron_rl.device import Device, settled_seconds
    from megatron_rl.model.decoder import head_weight
    from megatron_rl.model.log_probs import VocabSoftmax, head_log_probs

    tiny = small or device == "cpu"
    groups, one = join_world(device), Device(device)
    model = trainer_model(save("Llama", **({} if tiny else BILLION)), "bfloat16", device, groups)
    vocab = 70 if tiny else BILLION["vocab_size"]
    lengths = [60, 11, 200, 33] if tiny else [512, 2048, 900, 1400, 300, 2000]
    rows = random_rows(lengths, device, vocab)
    figures["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    figures["tokens"] = sum(lengths)
    for name, batch, segments in (("padded", padded(rows), None), ("packed", torch.cat(rows)[None], lengths)):
        seconds = []
        one.reset_peak_memory()
        for _ in range(3):
            start = settled_seconds(one.torch_device)
            hidden = hidden_states(model, batch, segments)[:, :-1].flatten(0, 1)
            log_probs, _ = head_log_probs(
                hidden, head_weight(model), batch[:, 1:].flatten(), VocabSoftmax(vocab, 1.0, groups.tp_group)
            )
            (-log_probs.mean()).backward()
            seconds.append(settled_seconds(one.torch_device) - start)
            finite = all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
            model.zero_grad()
            assert finite, f"{name}: a gradient is not finite"
        peak = one.peak_memory_bytes()
        figures[name] = {
            "seconds": round(min(seconds[1:]), 4),
            "peak GiB": None if peak is None else round(peak / 2**30, 2),
        }


if __name__ == "__main__":
    step_outcome.main(run)
