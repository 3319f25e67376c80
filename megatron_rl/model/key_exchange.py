"""How the keys and values of all context-parallel ranks come to every rank, and how parts change ranks.

Legend: t tokens of this rank, K key/value heads of this TP rank, D head size, C ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class KeyExchange(Protocol):
    """How the keys and values of all ranks, [2, t, K, D] of each, come to every rank."""

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its keys and values) of every rank, this one's first."""

    def returned(self, own: Tensor, gradients: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Float32: the gradients that all ranks have of `own`, added up.

        gradients: (rank, its keys and values) -> the gradients that this rank has of them.
        """


class Gathered:
    """All at once. Of other ranks' keys nothing is kept: backward brings them together anew."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See `KeyExchange`."""
        size, rank = self.group.size(), self.group.rank()
        everyones = own.new_empty(size, *own.shape)
        dist.all_gather_into_tensor(everyones.flatten(0, 1), own, group=self.group)
        for step in range(size):
            source = (rank - step) % size
            yield source, everyones[source]

    def returned(self, own: Tensor, gradients: Callable[[int, Tensor], Tensor]) -> Tensor:
        """See `KeyExchange`."""
        found = {source: gradients(source, pair) for source, pair in self.blocks(own)}
        everyones = torch.cat([found[source] for source in range(self.group.size())])
        total = torch.empty(own.shape, dtype=torch.float32, device=own.device)
        dist.reduce_scatter_tensor(total, everyones, group=self.group)
        return total


class Ring:
    """One after the other, each on its way to the next rank while this one works with it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See `KeyExchange`."""
        size, rank = self.group.size(), self.group.rank()
        held = own
        for step in range(size):
            coming = self._pass_on(held) if step < size - 1 else None
            yield (rank - step) % size, held
            if coming is not None:
                held = coming()

    def returned(self, own: Tensor, gradients: Callable[[int, Tensor], Tensor]) -> Tensor:
        """See `KeyExchange`. Gradients follow the keys that they are of, one step behind, until they are home."""
        coming = None
        for source, pair in self.blocks(own):
            found = gradients(source, pair)
            if coming is not None:
                found += coming()
            coming = self._pass_on(found)
        assert coming is not None
        return coming()

    def _pass_on(self, sent: Tensor) -> Callable[[], Tensor]:
        """Send to the next rank; call what is returned to wait for that, and for what the rank before sent."""
        size, rank = self.group.size(), self.group.rank()
        after, before = (dist.get_global_rank(self.group, (rank + by) % size) for by in (1, -1))
        received = torch.empty_like(sent)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, after, self.group), dist.P2POp(dist.irecv, received, before, self.group)]
        )

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            _ = sent  # it must not be given back before
            return received

        return arrived


class ChangeParts(torch.autograd.Function):
    """x [C, ...] on every rank: its part i becomes part r of rank i. Done twice it changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return changed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return changed(grad, ctx.group), None


def changed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """See `ChangeParts`."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
