"""Colours of phases, common to all pictures of runs and plans."""

from __future__ import annotations

from zlib import crc32

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


def phase_name(phase: str) -> str:
    """Return a phase in words."""
    return NAMES.get(phase, phase)


def phase_color(phase: str) -> str:
    """Return the colour of a phase, which depends on its name alone."""
    known = STACKED | OCCASIONAL
    return known[phase] if phase in known else FURTHER[crc32(phase.encode()) % len(FURTHER)]
