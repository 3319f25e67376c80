"""Panels of lines that every picture of a run has: title, metrics with their labels, and scale."""

from __future__ import annotations

LINE_PANELS: tuple[tuple[str, dict[str, str], str], ...] = (
    ("Loss", {"actor/loss": "policy", "critic/loss": "reward model", "val/loss": "held out"}, "linear"),
    (
        "Pairs in the right order",
        {"actor/accuracy": "policy", "critic/accuracy": "reward model", "val/accuracy": "held out"},
        "linear",
    ),
    ("Mean reward", {"critic/score/mean": "task reward"}, "linear"),
    (
        "Rollout and trainer: |log-prob difference|",
        {"training/rollout_logprob_diff_max": "largest", "training/rollout_logprob_diff_mean": "mean"},
        "log",
    ),
    (
        "KL",
        {
            "actor/reward_kl_penalty": "policy to reference",
            "actor/kl_loss": "loss term",
            "actor/ppo_kl": "update to old policy",
        },
        "linear",
    ),
    ("Entropy (nats per token)", {"actor/entropy": "policy"}, "linear"),
    ("Gradient norm", {"actor/grad_norm": "actor", "critic/grad_norm": "critic"}, "log"),
    (
        "Load of experts: busiest over mean",
        {"actor/expert_load/max": "worst layer", "actor/expert_load/mean": "mean of layers"},
        "linear",
    ),
    ("Balancing losses", {"actor/moe_aux_loss/mean": "load", "actor/moe_z_loss/mean": "logits"}, "linear"),
)
