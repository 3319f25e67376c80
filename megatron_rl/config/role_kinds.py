"""The kinds of roles: one row with everything that depends on a role's kind and on no key. No other module asks for it.

Code for roles reads these fields, so that a new kind is a row here, a row in `config.roles` and a class in `roles`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ACTOR, REFERENCE, CRITIC, REWARD_MODEL, ROLLOUT = "actor", "reference", "critic", "reward_model", "rollout"
TEACHER, JUDGE = "teacher", "judge"
"""Names of kinds. Each is also the name of its only role; only reward models, judges and teachers may be several."""
TUNED, SCORER = "tuned", "scorer"
"""Kinds of the role that a task without generation trains. A policy has the name of the actor. A reward model has the
name of the critic, because it is saved and exported like one."""

TRAINED_OFFLOADS = ("grad_offload", "optimizer_offload")
PARAM_OFFLOAD = "param_offload"


class Head(Enum):
    """What a role's model ends in: a logit for each token of the vocabulary, or one value."""

    LANGUAGE = "language"
    VALUE = "value"


class StartsFrom(Enum):
    """Models that a role can start from: language models, classifiers with one label, or both."""

    LANGUAGE_MODEL = "language model"
    CLASSIFIER = "classifier"
    EITHER = "either"


@dataclass(frozen=True)
class RoleKind:
    """One kind of role.

    scored, updated: its place among the scores and among the updates of a step; kinds without such a pass have none.
    Roles of one place keep the order in which they are built. offloads: keys of `megatron` that move its memory to the
    host during generation. initial_of: the role that this one is as it was before training; None: it is no such role.

    generates: it is no model on Megatron's grid, but vLLM's engine. is_sampled: generation reads its weights. is_main:
    messages about its layout do not name it, and other layouts follow it. is_taught, teaches: it learns from teachers,
    or is one. gives_reward: its score is a part of the reward. judges: it writes that score, with an
    engine of its own. may_read_text: it may have a tokenizer of its own.
    takes_trees: rows of its passes may be a trie. names_a_role: a role has the kind's name, and no other one may.
    """

    name: str
    scored: int | None
    updated: int | None
    head: Head = Head.LANGUAGE
    starts_from: StartsFrom = StartsFrom.LANGUAGE_MODEL
    offloads: tuple[str, ...] = ()
    initial_of: str | None = None
    generates: bool = False
    is_sampled: bool = False
    is_main: bool = False
    is_taught: bool = False
    teaches: bool = False
    gives_reward: bool = False
    judges: bool = False
    may_read_text: bool = False
    takes_trees: bool = True
    names_a_role: bool = True


_ROWS = (
    RoleKind(
        ACTOR,
        scored=3,
        updated=2,
        offloads=TRAINED_OFFLOADS,  # generation reads its parameters
        is_sampled=True,
        is_main=True,
        is_taught=True,
    ),
    RoleKind(REFERENCE, scored=5, updated=None, offloads=(PARAM_OFFLOAD,), initial_of=ACTOR),
    RoleKind(
        CRITIC,
        scored=6,
        updated=1,
        head=Head.VALUE,
        starts_from=StartsFrom.EITHER,
        offloads=(*TRAINED_OFFLOADS, PARAM_OFFLOAD),
    ),
    RoleKind(
        REWARD_MODEL,
        scored=1,
        updated=None,
        head=Head.VALUE,
        starts_from=StartsFrom.CLASSIFIER,
        offloads=(PARAM_OFFLOAD,),
        gives_reward=True,
        may_read_text=True,
        takes_trees=False,
    ),
    RoleKind(
        JUDGE,
        scored=None,
        updated=None,
        offloads=(PARAM_OFFLOAD,),
        gives_reward=True,
        judges=True,
        names_a_role=False,
    ),
    RoleKind(TEACHER, scored=2, updated=None, offloads=(PARAM_OFFLOAD,), teaches=True, names_a_role=False),
    RoleKind(ROLLOUT, scored=None, updated=None, generates=True),
    RoleKind(TUNED, scored=4, updated=4, names_a_role=False),
    RoleKind(SCORER, scored=7, updated=3, head=Head.VALUE, starts_from=StartsFrom.EITHER, names_a_role=False),
)
KINDS: dict[str, RoleKind] = {kind.name: kind for kind in _ROWS}
"""Every kind by its name."""
