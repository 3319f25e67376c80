"""What learning from teachers adds to a rank's memory: their heads next to the actor's, and the columns that travel.

Columns of several numbers a token are on the device for one micro-batch only; on a CPU, where the host is the device,
for a whole pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.config.algorithms import STUDENTS_TOP, distillation_reads, teaching
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.roles import RoleSpec, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.model.families import Model
from megatron_rl.model.parts import FP32
from megatron_rl.planning.weights import ELEMENT_BYTES

ID, SMALL_ID = 8, 4
"""Bytes of a token's id in an index, and in a column."""
COLUMNS = "teachers' columns"
"""Name of what passes hold of them."""
COPIES_AT_END = 3
"""Copies of all columns of a score when they are put in the order of rows: of blocks, end to end, and in order."""
OWN_PRODUCTS, THEIR_PRODUCTS = 4, 2
"""Products of a comparison's own head, forward, again in backward, and for both gradients; and of the other's head."""
TOP_UPDATE = 10
"""Float32 numbers for each of the top-k tokens at the worst moment of an update's head: log-probs of both, and what
their difference keeps for backward."""


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's head on the actor's last stage. hidden: columns. element: bytes. megatron: the teacher's settings."""

    teacher: str
    hidden: int
    element: int
    megatron: MegatronConfig

    @property
    def name(self) -> str:
        return f"{self.teacher} head"


@dataclass(frozen=True)
class TeachingCosts:
    """What one role has to do with teachers.

    heads: of teachers with a model of their own, next to the actor's. made: bytes that its score makes of a token.
    makes_logits: whether that score does. top: likeliest tokens that it finds of each. read: bytes of a token that its
    update reads. compared: tokens of a top-k that its update compares; 0: the whole vocabulary; None: nothing.
    products: further ones of a token with vocabulary heads in its update, in products with its own head.
    """

    heads: tuple[TeacherHead, ...] = ()
    made: int = 0
    makes_logits: bool = True
    top: int = 0
    read: int = 0
    compared: int | None = None
    products: float = 0.0

    @classmethod
    def of(cls, config: RunConfig, role: RoleSpec, models: Mapping[str, Model]) -> TeachingCosts:
        """Count for a teacher or the actor; nothing for other roles, and without teachers. models: by folder."""
        way = teaching(config) if role.kind.is_taught or role.kind.teaches else None
        if way is None:
            return NO_TEACHING
        top = min(config.distillation.distillation_loss.topk, models[role.model_path].shape.vocab_size)
        if role.kind.teaches:
            made = {"log_probs": 0, "top_k": 2 * FP32 * top, "log_probs_at": FP32 * top}
            if way.method in made:
                return cls(made=made[way.method], top=top if way.method == "top_k" else 0)
            return cls(made=math.prod(_sizes(role, models)), makes_logits=False)
        if way.method == "log_probs":
            return NO_TEACHING
        if way.method != "hidden_states":
            finds = STUDENTS_TOP in distillation_reads(config)
            read = top * (SMALL_ID + FP32)
            return cls(made=FP32 * top * finds, top=top * finds, read=read, compared=top, products=OWN_PRODUCTS)
        teachers = [each for each in roles_of(config) if each.kind.teaches]
        hidden, elements = zip(*(_sizes(each, models) for each in teachers), strict=True)
        heads = [TeacherHead(each.name, *_sizes(each, models), each.megatron) for each in teachers if not each.is_actor]
        theirs = THEIR_PRODUCTS * max(hidden) / _sizes(role, models)[0]
        return cls(tuple(heads), read=max(hidden) * max(elements), compared=0, products=OWN_PRODUCTS + theirs)

    @property
    def compares(self) -> bool:
        """Whether the role's update uses its head once more."""
        return self.compared is not None

    def found_bytes(self, tp_size: int) -> int:
        """Return the bytes of a token while the likeliest ones of all TP ranks are put together: ids and logits of this
        rank, and one of both gathered twice over.
        """
        return self.top * (2 * ID + FP32 + (2 * ID + FP32) * tp_size)

    @property
    def compared_bytes(self) -> int:
        """Bytes of a token at the worst moment of an update's comparison of the top-k."""
        return (self.compared or 0) * (ID + TOP_UPDATE * FP32)


NO_TEACHING = TeachingCosts()


def _sizes(role: RoleSpec, models: Mapping[str, Model]) -> tuple[int, int]:
    """(hidden size, bytes of an element) of a role's model."""
    return models[role.model_path].shape.hidden_size, ELEMENT_BYTES[role.megatron.dtype]
