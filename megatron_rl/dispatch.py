"""How one controller call becomes one call per rank, and how the answers become one: declared, not performed.

Workers mark their verbs with `@register`; the controller reads the mark. No Ray, no torch.distributed here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Dispatch(enum.Enum):
    """Which rank gets which rows of the records in a call, and whose answer counts.

    ONE_TO_ALL: every rank gets every argument whole; all answers, as a list in rank order.
    DP: records are split over data-parallel ranks (the same rows for all tp/pp ranks of one);
        collected from each data-parallel rank's collector (tp_rank 0 of the last pipeline stage).
    ROLLOUT_DP: records are split over rollout replicas, collected from one rank of each.
    RANK_ZERO: only rank 0 is called; its answer.
    """

    ONE_TO_ALL = "one_to_all"
    DP = "dp"
    ROLLOUT_DP = "rollout_dp"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Verb:
    """The mark `@register` leaves on a worker method: how to dispatch it and which role it acts for.

    balanced: rows may be shared out among data-parallel ranks by their lengths. The records must have `input_ids`, and
    the answers be records, whose rows come back in the order of the call, or dicts.
    """

    dispatch: Dispatch
    role: str
    balanced: bool = False


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands, as it reports itself once its process groups exist.

    `dp_collector` and `replica_collector` say whether this rank's answer represents its
    data-parallel rank or its rollout replica.
    """

    rank: int
    dp_rank: int
    dp_size: int
    dp_collector: bool
    replica: int
    num_replicas: int
    replica_collector: bool


def is_collector(dispatch: Dispatch, place: Coordinates) -> bool:
    """Whether the answer of the rank at `place` counts; those of all others are dropped where they are made."""
    match dispatch:
        case Dispatch.DP:
            return place.dp_collector
        case Dispatch.ROLLOUT_DP:
            return place.replica_collector
    return True


def register(dispatch: Dispatch, *, role: str, balanced: bool = False) -> Callable:
    """Mark a worker method as callable from the controller with the given dispatch, acting for `role` (see `Verb`)."""

    def mark(method: Callable) -> Callable:
        method.verb = Verb(dispatch, role, balanced)
        return method

    return mark
