"""How old the tokens of a batch are, in training steps, and what that does to them: the `staleness/*` metrics.

Legend: B responses, T sampled tokens of all responses, packed end to end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.losses.rollout_correction import measure
from megatron_rl.losses.rows import max_rows, spread
from megatron_rl.records import Batch, row_lengths


def staleness(experience: Batch, step: int) -> Tensor:
    """int64 [T]: steps between the weights that sampled a token and those that `step` begins with."""
    if "versions" not in experience:
        return torch.zeros_like(experience.flat("rollout_log_probs"), dtype=torch.int64)
    return (step - 1) - experience.flat("versions")


def is_fresh(experience: Batch, step: int) -> Tensor:
    """bool [T]: tokens of responses all of whose tokens the newest weights sampled."""
    lengths = row_lengths(experience["rollout_log_probs"])
    return spread(max_rows(staleness(experience, step), lengths) <= 0, lengths)


def staleness_metrics(experience: Batch, step: int) -> dict[str, float]:
    """Mean and largest staleness, responses of several versions, and for every age its share and its distance.

    kl, k3 of an age s, with rho = p_trainer / p_rollout: means of -log rho and of rho - 1 - log rho over its tokens
    (Schulman, "Approximating KL divergence"). {} where all tokens are of the newest weights by construction.
    """
    ages, versions = staleness(experience, step), experience.get("versions")
    if versions is None or not ages.numel():
        return {}
    mixed = [row.unique().numel() > 1 for row in versions.unbind()]
    metrics = {
        "staleness/mean": float(ages.double().mean()),
        "staleness/max": float(ages.max()),
        "staleness/mixed_answers": sum(mixed) / len(mixed),
    }
    if "old_log_probs" not in experience:
        return metrics
    log_probs = (experience.flat("old_log_probs"), experience.flat("rollout_log_probs"))
    kl, k3 = (measure(*log_probs, row_lengths(versions), f"token_{kind}") for kind in ("k1", "k3"))
    for age in ages.unique().tolist():
        of_age = ages == age
        metrics[f"staleness/{age}/share"] = float(of_age.double().mean())
        metrics[f"staleness/{age}/kl"] = float(kl[of_age].mean())
        metrics[f"staleness/{age}/k3"] = float(k3[of_age].mean())
    return metrics
