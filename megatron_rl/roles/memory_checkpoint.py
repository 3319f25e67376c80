"""Keep copies of a pool's trained state in host memory, each on two nodes, and load them into any layout.

`checkpoint/memory_checkpoint_plan.py` plans; here bytes move: files in shared memory outlive the processes that wrote
them, and a group of gloo's carries them between nodes while training goes on.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from safetensors import safe_open

from megatron_rl.checkpoint.memory_checkpoint_plan import (
    CHECKSUM,
    OPTIMIZER,
    PARTS,
    UNFINISHED,
    WEIGHTS,
    BoxRead,
    CopyFile,
    CopyPlace,
    SavedBox,
    files_of,
    reads_of,
    receivers,
    transfers,
)
from megatron_rl.checkpoint.saved_tensors import OPTIMIZER_PREFIX
from megatron_rl.errors import CopyLost, StorageError
from megatron_rl.roles.tensor_files import PieceWriter, reserved_file

Value = TypeVar("Value")

CHUNK_BYTES = 64 << 20
"""Bytes of one message between nodes."""
GENERATORS = "generators"


class MemoryCheckpoint:
    """The copies of one pool, as one rank keeps them; all ranks must call every method together."""

    def __init__(self, pool: str, rank: int, node: str, timeout: timedelta) -> None:
        """node: of this rank, by a name that no other node has."""
        self._pool, self._rank, self.node = pool, rank, node
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._nodes = self.gathered(node)
        self._local = [other for other, at in enumerate(self._nodes) if at == node]
        self._peers = receivers(self._nodes)
        self._kept: list[int] = []
        self._sending: threading.Thread | None = None
        self._failure: Exception | None = None
        self._writer = PieceWriter()

    # Taking

    def take(self, place: CopyPlace, step: int, tensors: Mapping[str, Mapping[str, ShardedTensor]], text: str) -> None:
        """Copy the tensors into this node's memory, and in the background to another node's.

        tensors: role -> what this rank owns. text: states of its generators. The two newest steps are kept. Raises
        RuntimeError if the previous copy could not be sent, and StorageError where this node has no room.
        """
        self.settle()
        self._remove_old(place)
        files = [CopyFile(place.attempt, step, self._pool, self._rank, part) for part in PARTS]
        with torch.no_grad():
            for file, content in zip(files, contents(tensors), strict=True):
                path = self.path(place, file)
                self._writer.write(Path(f"{path}{UNFINISHED}"), content, {GENERATORS: text})
                os.rename(f"{path}{UNFINISHED}", path)
        self._kept.append(step)
        self._sending = threading.Thread(target=self._send, args=(place, files), name="state copies", daemon=True)
        self._sending.start()

    def settle(self) -> None:
        """Wait until the newest copy is on another node, too. Raises RuntimeError if it could not be sent."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None
        if self._failure is not None:
            raise RuntimeError(f"the copy of the state could not be sent: {self._failure}") from self._failure

    def _send(self, place: CopyPlace, files: Sequence[CopyFile]) -> None:
        try:
            sums = [checksum(self.path(place, file)) for file in files]
            for file, number in zip(files, sums, strict=True):
                write_checksum(self.path(place, file), number)
            for source, target in enumerate(self._peers):
                if target is not None and self._rank in (source, target):
                    for file in files:
                        self._move(place, file._replace(rank=source), source, target)
        except Exception as error:  # raised by the next call
            self._failure = error

    def _remove_old(self, place: CopyPlace) -> None:
        """Remove what is older than the newest copy. Files of other layouts go a step later: their ranks are gone."""
        if not self._kept:
            self._remove_torn(place)
            return
        own = {self._rank, *(source for source, target in enumerate(self._peers) if target == self._rank)}
        for file in self._held(place):
            is_older = file.attempt == place.attempt and file.step < self._kept[-1]
            is_of_others = (file.attempt, file.step) < (place.attempt, self._kept[0])
            if (is_older and file.rank in own) or (is_of_others and self._rank == self._local[0]):
                remove(self.path(place, file))
        del self._kept[:-1]

    def _remove_torn(self, place: CopyPlace) -> None:
        """Remove files that a rank of an earlier attempt was writing when it was lost."""
        if self._rank == self._local[0]:
            for file in self._held(place, UNFINISHED):
                if file.attempt < place.attempt:
                    remove(Path(f"{self.path(place, file)}{UNFINISHED}"))

    # Loading

    def load(self, place: CopyPlace, step: int) -> CopySource:
        """Bring the headers of a step's files together; `place.attempt` is the attempt that wrote them.

        Raises CopyLost on all ranks where a file's checksum is wrong.
        """
        mine = [file for file in self._held(place) if (file.attempt, file.step) == (place.attempt, step)]
        share = sorted(mine)[self._local.index(self._rank) :: len(self._local)]
        headers, damaged = {}, []
        for file in share:
            path = self.path(place, file)
            if is_damaged(path):
                damaged.append(file)
            else:
                headers[file] = header_of(path)
        held: dict[str, list[CopyFile]] = {}
        saved: dict[CopyFile, Header] = {}
        for node, whole in self.gathered((self.node, headers)):
            held.setdefault(node, []).extend(whole)
            saved |= whole
        broken = [file for files in self.gathered(damaged) for file in files]
        return CopySource(self, place, held, saved, [file for file in broken if file not in saved])

    def fetch(self, source: CopySource, wanted: list[CopyFile]) -> None:
        """Bring the wanted files to this node; every rank names its own."""
        for file, sender, target in transfers(self.gathered(wanted), self._nodes, source.held):
            if self._rank in (sender, target):
                self._move(source.place, file, sender, target)
        dist.barrier(self._group)

    # Files

    def path(self, place: CopyPlace, file: CopyFile) -> Path:
        """Where this rank's node has a file."""
        return Path(f"{place.prefix}{file.name(self.node)}")

    def _held(self, place: CopyPlace, ending: str = "") -> list[CopyFile]:
        """Files of the pool on this node, of those whose names end so, without the ending."""
        prefix = Path(place.prefix)
        paths = prefix.parent.glob(f"{prefix.name}copy-*{ending}")
        names = (path.name.removeprefix(prefix.name).removesuffix(ending) for path in paths)
        return [file for file in files_of(names, self.node) if file.pool == self._pool]

    def _move(self, place: CopyPlace, file: CopyFile, source: int, target: int) -> None:
        """Send a file from one rank's node to another's; both ranks call."""
        path = self.path(place, file)
        if self._rank == source:
            send_file(path, target, self._group)
        else:
            receive_file(path, source, self._group)

    def gathered(self, value: Value) -> list[Value]:
        """Every rank's value, in rank order."""
        values = [value] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values


class Header(NamedTuple):
    """What a file says of itself. boxes: of its tensors. text: states of its rank's generators."""

    boxes: list[SavedBox]
    text: str


class CopySource:
    """The files of one step, wherever they are (a `SavedState` for each role)."""

    def __init__(
        self,
        copies: MemoryCheckpoint,
        place: CopyPlace,
        held: dict[str, list[CopyFile]],
        saved: dict[CopyFile, Header],
        damaged: list[CopyFile],
    ) -> None:
        self.place, self.held, self._saved, self._damaged = place, held, saved, damaged
        self._copies = copies

    def text(self, rank: int) -> str | None:
        """States of the generators that a rank saved; None if there was no such rank."""
        return next((header.text for file, header in self._saved.items() if file.rank == rank), None)

    def role(self, name: str) -> RoleCopies:
        """The tensors of one role."""
        return RoleCopies(self, name)

    def keys(self, role: str) -> set[str]:
        """Keys of a role's tensors."""
        return {box.key for header in self._saved.values() for box in header.boxes if box.role == role}

    def read(self, role: str, tensors: Mapping[str, ShardedTensor]) -> None:
        """Fill the tensors' data. Raises CopyLost on all ranks where the files do not hold all of them."""
        files = list(self._saved)
        targets = {box_of(role, tensor): tensor.data for tensor in tensors.values()}
        if len(targets) != len(tensors):
            raise ValueError(f"the {role} has {len(tensors)} tensors in {len(targets)} boxes")
        reads, lacking = reads_of(list(targets), [self._saved[file].boxes for file in files])
        copies = self._copies
        if lost := [box for boxes in copies.gathered(lacking[:1]) for box in boxes]:
            damage = (
                f"; damaged: {', '.join(file.name(copies.node) for file in self._damaged)}" if self._damaged else ""
            )
            raise CopyLost(f"the copies in memory do not contain {lost[0].key} of the {role}{damage}")
        used = sorted({read.file for read in reads})
        copies.fetch(self, [files[number] for number in used])
        for number in used:
            with safe_open(copies.path(self.place, files[number]), "pt") as content:
                for read in (each for each in reads if each.file == number):
                    fill(targets[read.wanted], read, content.get_slice(read.saved.name))


class RoleCopies:
    """The copied tensors of one role."""

    def __init__(self, source: CopySource, role: str) -> None:
        self._source, self._role = source, role

    @property
    def names(self) -> set[str]:
        """Keys of all tensors."""
        return self._source.keys(self._role)

    def read(self, tensors: dict[str, ShardedTensor]) -> None:
        """Fill the tensors' data. Raises as `CopySource.read`; every rank must call."""
        self._source.read(self._role, tensors)


def contents(tensors: Mapping[str, Mapping[str, ShardedTensor]]) -> list[dict[str, torch.Tensor]]:
    """The tensors of a rank's files, by their names there, in the order of `PARTS`."""
    parts: dict[str, dict[str, torch.Tensor]] = {WEIGHTS: {}, OPTIMIZER: {}}
    for role, own in tensors.items():
        for tensor in own.values():
            part = OPTIMIZER if tensor.key.startswith(OPTIMIZER_PREFIX) else WEIGHTS
            parts[part][box_of(role, tensor).name] = tensor.data.detach()
    return [parts[part] for part in PARTS]


def box_of(role: str, tensor: ShardedTensor) -> SavedBox:
    """The box that a tensor holds."""
    box = tuple((low, low + size) for low, size in zip(tensor.global_offset, tensor.local_shape, strict=True))
    return SavedBox(role, tensor.key, box)


def fill(target: torch.Tensor, read: BoxRead, saved: Callable[[tuple[slice, ...]], torch.Tensor]) -> None:
    """Copy what the read says from a file's tensor into `target`, a wanted box."""

    def index(box: SavedBox) -> tuple[slice, ...]:
        return tuple(
            slice(low - start, high - start) for (low, high), (start, _) in zip(read.box, box.box, strict=True)
        )

    target[index(read.wanted)].copy_(saved[index(read.saved)])  # type: ignore[index]


def header_of(path: Path) -> Header:
    """Read a file's names and text."""
    with safe_open(path, "pt") as content:
        names = list(content.keys())
        boxes = [SavedBox.of(name, content.get_slice(name).get_shape()) for name in names]
        return Header(boxes, content.metadata()[GENERATORS])


def mapped(path: Path) -> torch.Tensor:
    """A file's bytes as a tensor."""
    return torch.from_numpy(np.memmap(path, np.uint8, mode="r+"))


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    return crc32_of(mapped(path))


def crc32_of(content: torch.Tensor) -> int:
    """CRC-32 of bytes [n] in host memory."""
    return zlib.crc32(content.numpy().data)


def write_checksum(path: Path, number: int) -> None:
    """Write a file's checksum next to it."""
    Path(f"{path}{CHECKSUM}").write_text(str(number))


def is_damaged(path: Path) -> bool:
    """Whether a file differs from its checksum; a run that was hurt right after a copy has not computed it yet."""
    beside = Path(f"{path}{CHECKSUM}")
    return beside.exists() and beside.read_text() != str(checksum(path))


def remove(path: Path) -> None:
    """Remove a file and its checksum."""
    for each in (path, Path(f"{path}{CHECKSUM}")):
        with suppress(FileNotFoundError):
            each.unlink()


def send_file(path: Path, target: int, group: dist.ProcessGroup) -> None:
    """Send a file's size, checksum and bytes to a rank."""
    content, has_room = mapped(path), torch.tensor([0])
    dist.send(torch.tensor([content.numel(), checksum(path)]), target, group)
    dist.recv(has_room, target, group)
    if not has_room:
        raise RuntimeError(
            f"the node of rank {target} has no room for the {content.numel() / 1e9:.2f} GB of {path.name}"
        )
    for chunk in content.split(CHUNK_BYTES):
        dist.send(chunk, target, group)


def receive_file(path: Path, source: int, group: dist.ProcessGroup) -> None:
    """Write what `send_file` sends to `path`, which is there once it is whole. Raises RuntimeError for other bytes, and
    StorageError where there is no room, which the sender learns.
    """
    size, number = torch.tensor([0, 0]), 0
    dist.recv(size, source, group)
    num_bytes, number = (int(value) for value in size)
    unfinished = Path(f"{path}{UNFINISHED}")
    try:
        content = reserved_file(unfinished, num_bytes)
    except StorageError:
        dist.send(torch.tensor([0]), source, group)
        raise
    dist.send(torch.tensor([1]), source, group)
    for chunk in content.split(CHUNK_BYTES):
        dist.recv(chunk, source, group)
    if crc32_of(content) != number:
        unfinished.unlink()
        raise RuntimeError(f"{path.name} came with other bytes than were sent")
    write_checksum(path, number)
    unfinished.rename(path)
