"""Exchange keys and values between context-parallel ranks, or tokens for heads.

Legend: t tokens of this rank, T of all ranks, K key/value heads of this TP rank, D head size, C ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Gathered:
    """Bring the keys and values of all ranks, [2, t, K, D] each, to every rank at once.

    Other ranks' keys are not kept; backward gathers them again.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its keys and values) for every rank, this rank first."""
        size, rank = self.group.size(), self.group.rank()
        everyones = own.new_empty(size, *own.shape)
        dist.all_gather_into_tensor(everyones.flatten(0, 1), own, group=self.group)
        for step in range(size):
            source = (rank - step) % size
            yield source, everyones[source]

    def returned(self, own: Tensor, gradients: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The sum of all ranks' gradients of `own`, in float32.

        gradients: (rank, its keys and values) -> the gradients that this rank has of them.
        """
        of_ranks = {source: gradients(source, pair) for source, pair in self.blocks(own)}
        everyones = torch.cat([of_ranks[source] for source in range(self.group.size())])
        total = torch.empty(own.shape, dtype=torch.float32, device=own.device)
        dist.reduce_scatter_tensor(total, everyones, group=self.group)
        return total


class Ring:
    """The interface of `Gathered` with a ring: each block is on its way to the next rank while this rank uses it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its keys and values) for every rank, this rank first."""
        size, rank = self.group.size(), self.group.rank()
        held = own
        for step in range(size):
            arriving = self._pass_on(held) if step < size - 1 else None
            yield (rank - step) % size, held
            if arriving is not None:
                held = arriving()

    def returned(self, own: Tensor, gradients: Callable[[int, Tensor], Tensor]) -> Tensor:
        """See `Gathered.returned`. Gradients follow their keys around the ring, one step behind."""
        arriving = None
        for source, pair in self.blocks(own):
            total = gradients(source, pair)
            if arriving is not None:
                total += arriving()
            arriving = self._pass_on(total)
        assert arriving is not None
        return arriving()

    def _pass_on(self, sent: Tensor) -> Callable[[], Tensor]:
        """Send to the next rank; the returned function waits for that and returns what the previous rank sent."""
        size, rank = self.group.size(), self.group.rank()
        after, before = (dist.get_global_rank(self.group, (rank + by) % size) for by in (1, -1))
        received = torch.empty_like(sent)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, after, self.group), dist.P2POp(dist.irecv, received, before, self.group)]
        )

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            _ = sent  # it must not be freed before
            return received

        return arrived


class Alone:
    """The interface of `Gathered` for a rank that has all keys."""

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(0, this rank's keys and values)."""
        yield 0, own

    def returned(self, own: Tensor, gradients: Callable[[int, Tensor], Tensor]) -> Tensor:
        """See `Gathered.returned`."""
        return gradients(0, own)


KeyExchange = Gathered | Ring | Alone


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
