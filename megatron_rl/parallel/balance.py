"""Split sequences so that every part has about the same work: over ranks, and into packs. Pure and torch-free.

    lengths --SequenceWork--> work --share_out--> parts of given capacity --pack--> as few packs as there can be

Items are named by their index. Equal inputs give equal plans, on every machine.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 1e-3
"""Parts are even if their work differs by less than this share of the mean."""


@dataclass(frozen=True)
class SequenceWork:
    """FLOPs of one sequence in units of one token's matrices: L + L^2 / attention_parity.

    attention_parity: the length at which causal attention costs as much as the matrices (see `ModelShape`). by_prompt:
    ranks compute once what their rows have in common, so that rows of one prompt belong on one rank.
    """

    attention_parity: float
    by_prompt: bool = False

    def __call__(self, lengths: Sequence[int]) -> list[float]:
        """Work of sequences of these lengths."""
        return [length + length * length / self.attention_parity for length in lengths]


def share_out(work: Sequence[float], weights: Sequence[int], capacities: Sequence[int]) -> list[list[int]] | None:
    """Split items into parts with about equal `work`, each with at most its capacity in summed `weights`.

    Returns None if no split was found. The heaviest item comes first; each goes to the part with the least work that
    has room for it. Then items are exchanged or moved between the part with the most work and the others. Indices
    within a part ascend.
    """
    order = sorted(range(len(work)), key=lambda item: (-work[item], item))
    parts: list[list[int]] = [[] for _ in capacities]
    room, done = list(capacities), [0.0] * len(capacities)
    heap = [(0.0, part) for part in range(len(capacities))]
    for item in order:
        too_full = []
        while heap and room[heap[0][1]] < weights[item]:
            too_full.append(heapq.heappop(heap))
        if not heap:
            return None
        _, part = heap[0]
        parts[part].append(item)
        room[part] -= weights[item]
        done[part] += work[item]
        heapq.heapreplace(heap, (done[part], part))
        for entry in too_full:
            if room[entry[1]] > 0:
                heapq.heappush(heap, entry)
    even_out(parts, work, weights, room, done)
    return [sorted(part) for part in parts]


def even_out(
    parts: list[list[int]], work: Sequence[float], weights: Sequence[int], room: list[int], done: list[float]
) -> None:
    """Lower the largest `done` by exchanges that keep every part within its `room`, while that helps."""
    mean = sum(done) / len(done)
    for _ in range(4 * len(parts)):
        heavy = max(range(len(parts)), key=done.__getitem__)
        if done[heavy] - mean <= TOLERANCE * mean:
            return
        for light in sorted(range(len(parts)), key=done.__getitem__):
            exchange = best_exchange(parts[heavy], parts[light], work, weights, room[heavy], room[light])
            if light != heavy and exchange.gain((done[heavy] - done[light]) / 2) > TOLERANCE * mean / 4:
                break
        else:
            return
        give, take = exchange.give, exchange.take
        for source, target, item in ((heavy, light, give), (light, heavy, take)):
            if item is not None:
                parts[source].remove(item)
                parts[target].append(item)
                room[source] += weights[item]
                room[target] -= weights[item]
                done[source] -= work[item]
                done[target] += work[item]


@dataclass(frozen=True)
class Swap:
    """Move one item out of the part with more work and one or none back. moved: the difference in work."""

    give: int | None
    take: int | None
    moved: float

    def gain(self, wanted: float) -> float:
        """How much closer two parts come to their mean, from which they are `wanted` away."""
        return wanted - abs(wanted - self.moved)


def best_exchange(
    heavy: list[int], light: list[int], work: Sequence[float], weights: Sequence[int], heavy_room: int, light_room: int
) -> Swap:
    """The exchange after which two parts differ least in work; one without items if none is allowed."""
    wanted = (sum(work[item] for item in heavy) - sum(work[item] for item in light)) / 2
    best = Swap(None, None, 0.0)
    # Sorted by work, so that the best partners of an item are around one place.
    partners = sorted([(0.0, -1), *((work[item], item) for item in light)])
    for give in heavy:
        place = bisect_left(partners, (work[give] - wanted, -1))
        for taken_work, take in partners[max(0, place - 2) : place + 2]:
            change = weights[give] - (weights[take] if take >= 0 else 0)
            exchange = Swap(give, take if take >= 0 else None, work[give] - taken_work)
            if -heavy_room <= change <= light_room and exchange.gain(wanted) > best.gain(wanted):
                best = exchange
    return best


def together(prompts: Sequence[int], lengths: Sequence[int], most: int, max_tokens: int) -> list[list[int]]:
    """Rows with the same prompt, in parts of at most `most` rows and `max_tokens` tokens; every row once."""
    parts: list[list[int]] = []
    open_part: dict[int, tuple[int, int]] = {}  # prompt -> (part that takes more, its tokens)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        part, tokens = open_part.get(prompt, (-1, 0))
        if part < 0 or len(parts[part]) == most or tokens + length > max_tokens:
            parts.append([])
            part, tokens = len(parts) - 1, 0
        parts[part].append(row)
        open_part[prompt] = (part, tokens + length)
    return parts


def share_out_prompts(
    prompts: Sequence[int],
    lengths: Sequence[int],
    num_prompt_tokens: Sequence[int],
    work: SequenceWork,
    capacities: Sequence[int],
) -> list[list[int]] | None:
    """`share_out` of rows that weigh 1, with as many rows of a prompt in one part as fill all parts.

    A prompt counts once where its rows are in one unit.
    """
    of_rows, of_prompts = work(lengths), work(num_prompt_tokens)
    most = max(Counter(prompts).values())
    while most > 1:
        units = together(prompts, lengths, most, sum(lengths))
        costs = [sum(of_rows[row] for row in unit) - (len(unit) - 1) * of_prompts[unit[0]] for unit in units]
        parts = share_out(costs, [len(unit) for unit in units], capacities)
        if parts is not None:
            return [sorted(row for unit in part for row in units[unit]) for part in parts]
        most //= 2
    return share_out(of_rows, [1] * len(of_rows), capacities)


def pack(
    tokens: Sequence[int], work: Sequence[float], max_tokens: int, num_packs: int = 1, multiple: int = 1
) -> list[list[int]]:
    """Put sequences into few packs of at most `max_tokens` tokens, with about equal `work`.

    The number of packs is at least `num_packs` and a multiple of `multiple`, but no pack is empty: there are never more
    packs than sequences.
    Raises ValueError for a sequence of more than `max_tokens`.
    """
    longest = max(tokens)
    if longest > max_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit into a pack of {max_tokens}")
    largest_first = best_fit(tokens, max_tokens)
    fewest = max(num_packs, -(-sum(tokens) // max_tokens))
    # `share_out` sometimes needs fewer packs than best fit, so every number from the bound on is tried.
    for wanted in range(fewest, max(fewest, len(largest_first)) + 1):
        rounded = min(-(-wanted // multiple) * multiple, len(tokens))
        packs = share_out(work, tokens, [max_tokens] * rounded)
        if packs is not None:
            return packs
    wanted = -(-max(fewest, len(largest_first)) // multiple) * multiple
    packs = split_fullest(largest_first, tokens, min(wanted, len(tokens)))
    room = [max_tokens - sum(tokens[item] for item in items) for items in packs]
    even_out(packs, work, tokens, room, [sum(work[item] for item in items) for items in packs])
    return [sorted(items) for items in packs]


def best_fit(tokens: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best fit decreasing: the largest item first, each into the fullest pack that has room for it."""
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for item in sorted(range(len(tokens)), key=lambda item: (-tokens[item], item)):
        place = bisect_left(rooms, (tokens[item], -1))
        if place == len(rooms):
            packs.append([])
            room, number = max_tokens, len(packs) - 1
        else:
            room, number = rooms.pop(place)
        packs[number].append(item)
        insort(rooms, (room - tokens[item], number))
    return packs


def split_fullest(packs: list[list[int]], tokens: Sequence[int], num_packs: int) -> list[list[int]]:
    """Halve the fullest packs until there are `num_packs`."""
    packs = [list(items) for items in packs]
    while len(packs) < num_packs:
        fullest = max(packs, key=lambda items: (len(items) > 1, sum(tokens[item] for item in items)))
        packs.append([fullest.pop() for _ in range(len(fullest) // 2)])
    return packs
