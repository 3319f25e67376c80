"""Spread waiting requests evenly over replicas, by their number or by how long they will take."""

from __future__ import annotations

from collections.abc import Sequence


def even_shares(loads: Sequence[int], rooms: Sequence[int], num_waiting: int) -> list[int]:
    """How many of `num_waiting` requests each replica gets, so that their loads become as even as possible.

    loads: requests that each runs now; rooms: how many more it takes. The remainder goes to the first replicas. Without
    loads the shares are equal, the first ones larger by one. Requests without room stay.
    """
    num_given = min(num_waiting, sum(rooms))
    low, high = 0, max((load + room for load, room in zip(loads, rooms, strict=True)), default=0)
    while low < high:  # search the lowest level to which replicas must be filled
        level = (low + high) // 2
        if sum(_shares(loads, rooms, level)) >= num_given:
            high = level
        else:
            low = level + 1
    shares = _shares(loads, rooms, low - 1)
    rest = num_given - sum(shares)
    for index, (load, room) in enumerate(zip(loads, rooms, strict=True)):
        if rest and load + shares[index] < low and shares[index] < room:
            shares[index] += 1
            rest -= 1
    return shares


def _shares(loads: Sequence[int], rooms: Sequence[int], level: int) -> list[int]:
    return [min(room, max(0, level - load)) for load, room in zip(loads, rooms, strict=True)]


def by_expected_length(
    groups: Sequence[Sequence[int]], expected: Sequence[float], loads: Sequence[float], rooms: Sequence[int]
) -> list[list[int]]:
    """The requests that each replica gets, so that replicas end as evenly as expected lengths say.

    groups: requests that share a prompt, and stay together where a replica has room for all. expected: tokens of each
    request of a group. loads: tokens that each replica has left to generate; rooms: requests that it takes, together
    enough for all. The longest groups are given first, each to the replica with the least to do, the first of equal
    ones.
    """
    given: list[list[int]] = [[] for _ in rooms]
    ends = list(loads)
    for at in sorted(range(len(groups)), key=lambda at: (-expected[at] * len(groups[at]), at)):
        rest = list(groups[at])
        while rest:
            fits = [replica for replica, room in enumerate(rooms) if len(given[replica]) + len(rest) <= room]
            open_to = fits or [replica for replica, room in enumerate(rooms) if len(given[replica]) < room]
            replica = min(open_to, key=lambda replica: ends[replica])
            part = rest[: rooms[replica] - len(given[replica])]
            given[replica] += part
            ends[replica] += expected[at] * len(part)
            rest = rest[len(part) :]
    return given
