"""Copies of the trained state in the host memory of nodes: their files, who sends them to whom, and what is read.

A rank writes two files for each copied step, as safetensors in shared memory: the weights that it updates, and their
optimizer state. A rank of another node gets a copy of both. Pure functions; `roles/memory_checkpoint.py` moves the
bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import quote, unquote

from megatron_rl.parallel.sharding import Box, box_numel, intersect

WEIGHTS, OPTIMIZER = "weights", "optimizer"
PARTS = (WEIGHTS, OPTIMIZER)
"""The files of one rank and step. A rank reads the weights of its whole shard, but only the optimizer state it owns."""

CHECKSUM, UNFINISHED = ".crc32", ".unfinished"
"""Endings of what is next to a file, and of a file that is being written."""

_NAME = re.compile(
    r"copy-(?P<node>[0-9a-f]{12})-(?P<attempt>\d+)-(?P<step>\d+)-(?P<rank>\d+)-(?P<pool>.+)-(?P<part>\w+)"
)
_NODE_LETTERS = 12


class CopyFile(NamedTuple):
    """What a file holds. attempt: the number of the start of ranks that wrote it. rank: of `pool`, which wrote it."""

    attempt: int
    step: int
    pool: str
    rank: int
    part: str

    def name(self, node: str) -> str:
        """The file's name on a node, after the run's prefix. node: any name; nodes may share one folder in tests."""
        return f"copy-{node_tag(node)}-{self.attempt}-{self.step}-{self.rank}-{quote(self.pool, safe='')}-{self.part}"


class CopyPlace(NamedTuple):
    """Where copies are. prefix: of their paths, in shared memory until the run ends. attempt: see `CopyFile`."""

    prefix: str
    attempt: int


def node_tag(node: str) -> str:
    """The letters that stand for a node in names of files."""
    return sha256(node.encode()).hexdigest()[:_NODE_LETTERS]


def files_of(names: Iterable[str], node: str) -> list[CopyFile]:
    """The complete copies among `names`, names of files without the run's prefix, that a node has for itself."""
    matches = (_NAME.fullmatch(name) for name in names)
    return [
        CopyFile(int(match["attempt"]), int(match["step"]), unquote(match["pool"]), int(match["rank"]), match["part"])
        for match in matches
        if match is not None and match["node"] == node_tag(node) and match["part"] in PARTS
    ]


def is_whole(held: Iterable[CopyFile], attempt: int, step: int, num_ranks: Mapping[str, int]) -> bool:
    """Whether `held`, the files of all living nodes, has all files of a step. num_ranks: pool -> its ranks."""
    wanted = {
        CopyFile(attempt, step, pool, rank, part)
        for pool, size in num_ranks.items()
        for rank in range(size)
        for part in PARTS
    }
    return wanted <= set(held)


def receivers(nodes: Sequence[str]) -> list[int | None]:
    """For each rank, return the rank on another node that keeps its copy, or None if all ranks are on one node.

    nodes: rank -> its node. A node's copies are on the next node, spread over its ranks.
    """
    order = list(dict.fromkeys(nodes))
    ranks = {node: [rank for rank, at in enumerate(nodes) if at == node] for node in order}
    if len(order) == 1:
        return [None] * len(nodes)
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [
        ranks[following[node]][ranks[node].index(rank) % len(ranks[following[node]])] for rank, node in enumerate(nodes)
    ]


class SavedBox(NamedTuple):
    """A tensor of a file: a box of the whole tensor `key` of a role."""

    role: str
    key: str
    box: Box

    @property
    def name(self) -> str:
        """Its name in the file."""
        return f"{self.role}|{self.key}|{','.join(str(low) for low, _ in self.box)}"

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> SavedBox:
        """Read back a `name`, of a tensor of this shape."""
        role, key, corner = name.split("|")
        lows = [int(low) for low in corner.split(",")] if corner else []
        return cls(role, key, tuple((low, low + size) for low, size in zip(lows, shape, strict=True)))


@dataclass(frozen=True)
class BoxRead:
    """Copy `box` of the whole tensor from a file's tensor to a wanted one. file: an index in a list of files."""

    file: int
    saved: SavedBox
    wanted: SavedBox
    box: Box


def reads_of(wanted: Sequence[SavedBox], saved: Sequence[Sequence[SavedBox]]) -> tuple[list[BoxRead], list[SavedBox]]:
    """(what to read, wanted boxes that the files do not cover). saved: file -> its boxes; no two of a key overlap."""
    by_key: dict[tuple[str, str], list[tuple[int, SavedBox]]] = {}
    for file, boxes in enumerate(saved):
        for box in boxes:
            by_key.setdefault((box.role, box.key), []).append((file, box))
    reads, lacking = [], []
    for want in wanted:
        covered = 0
        for file, box in by_key.get((want.role, want.key), ()):
            common = intersect(want.box, box.box)
            if common is not None:
                covered += box_numel(common)
                reads.append(BoxRead(file, box, want, common))
        if covered != box_numel(want.box):
            lacking.append(want)
    return reads, lacking


class FileTransfer(NamedTuple):
    """A file that rank `source` sends to rank `target`, which writes it for its node."""

    file: CopyFile
    source: int
    target: int


def transfers(
    wanted: Sequence[Iterable[CopyFile]], nodes: Sequence[str], held: Mapping[str, Iterable[CopyFile]]
) -> list[FileTransfer]:
    """The fewest transfers after which every node has the files that its ranks want, in one order for all ranks.

    wanted: rank -> files. nodes: rank -> its node. held: node -> its files. Raises KeyError for a file that none has.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    holders: dict[CopyFile, list[str]] = {}
    for node in ranks:
        for file in held.get(node, ()):
            holders.setdefault(file, []).append(node)
    moves = []
    for node, here in ranks.items():
        lacking = sorted({file for rank in here for file in wanted[rank]} - set(held.get(node, ())))
        for number, file in enumerate(lacking):
            source = ranks[holders[file][0]]
            moves.append(FileTransfer(file, source[number % len(source)], here[number % len(here)]))
    return moves
