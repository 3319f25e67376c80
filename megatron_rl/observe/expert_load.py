"""From how many tokens each expert was sent to the `actor/expert_load/*` metrics, and of routers' losses. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def expert_load_metrics(counts: torch.Tensor, layers: Sequence[int]) -> dict[str, float]:
    """counts: int64 [layers, experts], tokens that each expert was sent; {} where none was. layers: their numbers.

    The load of a layer is what its busiest expert was sent over the mean of its experts: 1 is even, and the number of
    experts over those to a token is the worst. `max` and `mean` are over layers; `idle`: the share of experts that were
    sent nothing.
    """
    if not counts.any():
        return {}
    load = counts.amax(1) / counts.double().mean(1)
    by_layer = {f"actor/expert_load/layer_{layer}": value for layer, value in zip(layers, load.tolist(), strict=True)}
    return {
        "actor/expert_load/max": float(load.max()),
        "actor/expert_load/mean": float(load.mean()),
        "actor/expert_load/idle": float((counts == 0).double().mean()),
        **by_layer,
    }


def balance_metrics(losses: torch.Tensor, layers: Sequence[int]) -> dict[str, float]:
    """losses: float [layers, 2], the aux loss and the z loss of each, before coefficients. layers: their numbers.

    An aux loss of 1 is even, or a router that says nothing; the number of experts over those to a token is the worst.
    """
    found: dict[str, float] = {}
    for column, name in enumerate(("aux", "z")):
        values = losses[:, column].tolist()
        found |= {f"actor/moe_{name}_loss/layer_{layer}": value for layer, value in zip(layers, values, strict=True)}
        found[f"actor/moe_{name}_loss/mean"] = sum(values) / len(values)
    return found
