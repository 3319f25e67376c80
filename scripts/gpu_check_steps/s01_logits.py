"""Padded = packed = transformers, for three families, in 32 and 16 bits."""

from __future__ import annotations

from typing import Any

import step_outcome
import torch
import transformers
from models import KINDS, hidden_states, join_world, padded, random_rows, save, trainer_model

LENGTHS = [9, 3, 17, 40]
BOUNDS = {"float32": 2e-3, "bfloat16": 0.6}
"""Bounds for logits of about 10; float32 matrices may be multiplied in TF32."""


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """The largest differences of logits by family and type."""
    from megatron_rl.model.decoder import head_weight

    groups = join_world(device)
    rows = random_rows(LENGTHS, device)
    for kind in list(KINDS)[: 1 if small else None]:
        folder = save(kind)
        for dtype in ("float32", "bfloat16"):
            model = trainer_model(folder, dtype, device, groups)
            # Expert by expert, in plain products: ours alone are grouped.
            options = {"dtype": getattr(torch, dtype), "experts_implementation": "eager"}
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).to(device)
            with torch.no_grad():
                weight = head_weight(model)[: theirs.config.vocab_size]
                whole = hidden_states(model, padded(rows))
                apart = torch.cat([whole[row, :length] for row, length in enumerate(LENGTHS)]) @ weight.t()
                packed = hidden_states(model, torch.cat(rows)[None], LENGTHS)[0] @ weight.t()
                expected = torch.cat([theirs(row[None]).logits[0] for row in rows])
            found = {
                "padded - transformers": (apart.float() - expected.float()).abs().max().item(),
                "packed - transformers": (packed.float() - expected.float()).abs().max().item(),
            }
            figures[f"{kind} {dtype}"] = found
            assert max(found.values()) < BOUNDS[dtype], f"{kind} {dtype}: {found}"


if __name__ == "__main__":
    step_outcome.main(run)
