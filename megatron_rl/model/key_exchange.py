"""Exchange keys and values between context-parallel ranks, or tokens for heads.

Legend: t tokens of this rank, T of all ranks, K key/value heads of this TP rank, D head size, C ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Pair = Tensor | tuple[Tensor, Tensor]
"""Keys and values of a rank: [2, t, K, D], or both apart where they do not travel."""


class Alone:
    """A rank that has all keys."""

    def blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Pair]]:
        """(rank, its keys and values) for every rank whose keys are read, this rank first."""
        yield 0, (key, value)

    def returned(self, key: Tensor, value: Tensor, gradients: Callable[[int, Pair], Tensor]) -> Tensor:
        """The sum of all ranks' gradients of this rank's key and value, [2, t, K, D], at least as precise as float32.

        gradients: (rank, its keys and values) -> the gradients that this rank has of them.
        """
        return gradients(0, (key, value))


class Gathered:
    """`Alone`, where the keys and values of all ranks are brought to every rank at once.

    Other ranks' keys are not kept; backward gathers them again.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Pair]]:
        """See `Alone.blocks`."""
        size, rank, own = self.group.size(), self.group.rank(), torch.stack([key, value])
        everyones = own.new_empty(size, *own.shape)
        dist.all_gather_into_tensor(everyones.flatten(0, 1), own, group=self.group)
        for step in range(size):
            source = (rank - step) % size
            yield source, everyones[source]

    def returned(self, key: Tensor, value: Tensor, gradients: Callable[[int, Pair], Tensor]) -> Tensor:
        """See `Alone.returned`."""
        of_ranks = {source: gradients(source, pair) for source, pair in self.blocks(key, value)}
        everyones = torch.cat([of_ranks[source] for source in range(self.group.size())])
        total = torch.empty((2, *key.shape), dtype=torch.float32, device=key.device)
        dist.reduce_scatter_tensor(total, everyones, group=self.group)
        return total


class Ring(Gathered):
    """Pass keys and values around a ring: each block is on its way to the next rank while this rank uses it."""

    def blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Pair]]:
        """See `Alone.blocks`."""
        size, rank, held = self.group.size(), self.group.rank(), torch.stack([key, value])
        for step in range(size):
            arriving = self._pass_on(held) if step < size - 1 else None
            yield (rank - step) % size, held
            if arriving is not None:
                held = arriving()

    def returned(self, key: Tensor, value: Tensor, gradients: Callable[[int, Pair], Tensor]) -> Tensor:
        """See `Alone.returned`. Gradients follow their keys around the ring, one step behind."""
        arriving = None
        for source, pair in self.blocks(key, value):
            total = gradients(source, pair)
            if arriving is not None:
                total += arriving()
            arriving = self._pass_on(total)
        assert arriving is not None
        return arriving()

    def _pass_on(self, sent: Tensor) -> Callable[[], Tensor]:
        return passed(self.group, 1, sent, torch.empty_like(sent))


class Nearby(Gathered):
    """Send each rank the keys and values that it reads, and no others, one step ahead of their use.

    read: (reader, rank) -> int64, which of the rank's tokens the reader reads.
    """

    def __init__(self, group: dist.ProcessGroup, read: Callable[[int, int], Tensor]) -> None:
        super().__init__(group)
        self.read = read

    def blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Pair]]:
        """See `Alone.blocks`. Tokens that are not read have no values. All ranks send in the same order."""
        size, rank, own = self.group.size(), self.group.rank(), torch.stack([key, value])
        held = own
        for step in range(size):
            arriving = self._sent(own, step + 1) if step < size - 1 else None
            yield (rank - step) % size, held
            if arriving is not None:
                rows = self.read(rank, (rank - step - 1) % size)
                held = own.new_empty(own.shape).index_copy_(1, rows, arriving())

    def returned(self, key: Tensor, value: Tensor, gradients: Callable[[int, Pair], Tensor]) -> Tensor:
        """See `Alone.returned`. Each rank sends back the gradients of keys that it read, one step behind."""
        size, rank = self.group.size(), self.group.rank()
        of_ranks = self.blocks(key, value)
        total = gradients(*next(of_ranks))
        columns, arriving = self.read(rank, rank)[:0], lambda: total[:, :0]
        for step, (source, pair) in enumerate(of_ranks, 1):
            rows = self.read(rank, source)
            sent = gradients(source, pair).index_select(1, rows) if len(rows) else total[:, :0]
            total.index_add_(1, columns, arriving())
            columns = self.read((rank + step) % size, rank)
            arriving = passed(self.group, -step, sent, total.new_empty(2, len(columns), *key.shape[1:]))
        return total.index_add_(1, columns, arriving())

    def _sent(self, own: Tensor, step: int) -> Callable[[], Tensor]:
        """Send to the rank that many steps after this one; see `passed`."""
        size, rank = self.group.size(), self.group.rank()
        sent = own.index_select(1, self.read((rank + step) % size, rank))
        rows = self.read(rank, (rank - step) % size)
        return passed(self.group, step, sent, own.new_empty(2, len(rows), *own.shape[2:]))


def passed(group: dist.ProcessGroup, step: int, sent: Tensor, received: Tensor) -> Callable[[], Tensor]:
    """Send to the rank `step` after this one; the returned function waits for that, and for the message of the rank as
    many before it, which it returns. Nothing empty is sent.
    """
    size, rank = group.size(), group.rank()
    after, before = (dist.get_global_rank(group, (rank + by) % size) for by in (step, -step))
    ends = [(dist.isend, sent, after), (dist.irecv, received, before)]
    messages = [dist.P2POp(function, tensor, peer, group) for function, tensor, peer in ends if tensor.numel()]
    works = dist.batch_isend_irecv(messages) if messages else []

    def arrived() -> Tensor:
        for work in works:
            work.wait()
        _ = sent  # it must not be freed before
        return received

    return arrived


KeyExchange = Alone | Gathered


class ChangeParts(torch.autograd.Function):
    """All-to-all of x [C, ...]: part i of rank r becomes part r of rank i. It is its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return changed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return changed(grad, ctx.group), None


def to_heads(parts: Sequence[Tensor], back: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give each rank all tokens of its share of the heads: parts [t, heads, ...] -> [T, columns of all parts / C].

    C must divide the heads of every part; rank i gets the i-th share of each, end to end. back: int64 [T], where the
    tokens of the sequences are among those of all ranks, rank after rank. All ranks must call.
    """
    shares = [part.unflatten(1, (group.size(), -1)).flatten(2) for part in parts]
    mixed: Tensor = ChangeParts.apply(torch.cat(shares, -1).transpose(0, 1), group)
    return mixed.flatten(0, 1).index_select(0, back)


def to_own_tokens(out: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give each rank all heads of its tokens: out [T, heads / C, ...] -> [t, heads, ...]. order: the inverse of `back`
    in `to_heads`. All ranks must call.
    """
    mine: Tensor = ChangeParts.apply(out.index_select(0, order).unflatten(0, (group.size(), -1)), group)
    return mine.transpose(0, 1).flatten(1, 2)


def changed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """See `ChangeParts`."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
