"""Colours, names of phases, and panels of lines, which all pictures of runs and plans have in common."""

from __future__ import annotations

from zlib import crc32

INK, LABEL, FAINT = "#1f2933", "#52606d", "#9aa5b1"
"""Text; names of axes, lighter than text; lines of grids and axes, too light for text."""
WHITE = "#ffffff"
READABLE = 4.5
"""Least contrast of text with what is behind it (WCAG 2.2, level AA)."""
STACKED = {
    "gen": "#0b7a75",
    "turns": "#9ab87a",
    "reward": "#c9405a",
    "old_log_prob": "#edae49",
    "ref": "#30638e",
    "values": "#7b5ea7",
    "adv": "#8cb369",
    "log_probs": "#5c6b73",
    "scores": "#b5a642",
    "update_critic": "#c97b63",
    "update_actor": "#1d3557",
    "reshard": "#f28fb1",
}
"""Phases of a step, in the order in which curves stack them, and their colours."""
OCCASIONAL = {
    "slice": "#3aa6a0",
    "testing": "#8d99ae",
    "save_checkpoint": "#6b4226",
    "copy_state": "#b08968",
    "export": "#386641",
}
"""Phases that are not in every step, or not of the trainer."""
FURTHER = ("#a23e8c", "#4f772d", "#c8441b", "#17becf", "#8a5f2e")
"""Colours of phases with other names, such as those of further reward models."""
NAMES = {
    "init": "start of the ranks",
    "gen": "generation",
    "slice": "generation",
    "turns": "turns of environments",
    "reward": "scoring of responses",
    "old_log_prob": "log-probs of the policy",
    "ref": "log-probs of the reference",
    "values": "values of the critic",
    "adv": "advantages",
    "update_critic": "update of the critic",
    "update_actor": "update of the actor",
    "reshard": "weight transfer",
    "testing": "validation",
    "save_checkpoint": "saving of a checkpoint",
    "copy_state": "copy of the state",
    "export": "export of the model",
}
"""Phases in words; one without an entry has its own name."""
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
"""Panels of lines that every picture of a run has: title, metrics with their labels, and scale."""


def phase_name(phase: str) -> str:
    """Return a phase in words."""
    return NAMES.get(phase, phase)


def phase_color(phase: str) -> str:
    """Return the colour of a phase, which depends on its name alone."""
    known = STACKED | OCCASIONAL
    return known[phase] if phase in known else FURTHER[crc32(phase.encode()) % len(FURTHER)]


def luminance(color: str) -> float:
    """Return the relative luminance of #rrggbb by WCAG 2.2: 0 is black, 1 is white."""
    shares = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2.2, from 1 (equal) to 21 (black and white)."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def text_color(background: str) -> str:
    """Return the colour, white or `INK`, that is easier to read on a background. Its contrast may be below 4.5."""
    return max((WHITE, INK), key=lambda color: contrast(color, background))
