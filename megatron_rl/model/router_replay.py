"""What routers choose: taken down, counted, and made to be the choice of another pass.

Megatron's routers ask an object for their top K where they have one (`router_replay`). Megatron's own keeps one list of
all routers of the process and pairs a recomputed forward with its first one by a mode that the caller switches; here
each chunk of the actor has its own, and a router tells a recomputed forward by itself.

Legend: T tokens that the routers of this rank see in one pass, E experts, K of them to a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.router_balance import Balance

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RoutingPlan:
    """What the routers of a chunk are told of one forward pass.

    num_rows: int64 [T], how many rows that are trained have the token: none has filler, several have a prompt that is
    computed once for them. trains: a backward pass follows. records: take down the router's own choice. experts:
    [T, layers, K], where to send the tokens that are `known`, bool [T]; None: as each router chooses. balance: of the
    rows, where losses keep the load of experts even.
    """

    num_rows: Tensor
    trains: bool
    records: bool = False
    experts: Tensor | None = None
    known: Tensor | None = None
    balance: Balance | None = None


class RouterTap:
    """Stands between one router and its top K. layer: of the router among those of its chunk.

    A forward pass without gradients in a pass that trains will be run again before its backward pass, with them: the
    k-th of those is the k-th of these, as blocks go backward through a chunk in the order in which they went forward.
    """

    def __init__(self, layer: int, num_experts: int) -> None:
        self.layer, self.num_experts = layer, num_experts
        self.told: RoutingPlan | None = None
        self.own: Tensor | None = None
        self.counts: Tensor | None = None
        self.losses: Tensor | None = None
        self.again: deque[RoutingPlan] = deque()
        self._current: RoutingPlan | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What Megatron's router calls: scores [T, E] -> (scores of the chosen experts, their numbers), both [T, K].

        Raises RuntimeError where the pass is about another number of tokens.
        """
        assert default_compute_topk is not None  # Megatron always gives it
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        told, is_first = self._next()
        self._current = told
        if told is None:
            return values, own
        if len(told.num_rows) != len(scores):
            raise RuntimeError(f"a router sees {len(scores)} tokens where its pass is about {len(told.num_rows)}")
        chosen = own if told.experts is None else self._replayed(told, own)
        if is_first:
            self.own = own if told.records else None
            self._count(chosen, told.num_rows)
        return (values, own) if told.experts is None else (scores.gather(1, chosen), chosen)

    def balance(self) -> Balance | None:
        """Of the pass in which the router was asked last, where its gradients will flow."""
        return self._current.balance if self._current is not None and torch.is_grad_enabled() else None

    def note_losses(self, losses: Tensor) -> None:
        """Add up this rank's share of the losses, float32 [2], of all passes."""
        self.losses = losses if self.losses is None else self.losses + losses

    def _next(self) -> tuple[RoutingPlan | None, bool]:
        """What the pass is told, and whether it is the first of its block."""
        if self.again and torch.is_grad_enabled():
            return self.again.popleft(), False
        if self.told is not None and self.told.trains and not torch.is_grad_enabled():
            self.again.append(self.told)
        return self.told, True

    def _replayed(self, told: RoutingPlan, own: Tensor) -> Tensor:
        assert told.experts is not None and told.known is not None
        return torch.where(told.known[:, None], told.experts[:, self.layer].long(), own)

    def _count(self, chosen: Tensor, num_rows: Tensor) -> None:
        if self.counts is None:
            self.counts = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device)
        # Unlike bincount it waits for no device.
        self.counts.scatter_add_(0, chosen.flatten(), num_rows[:, None].expand_as(chosen).flatten())


class ChunkRouters:
    """The routers of one chunk of a model. Building it puts a tap into each of them.

    routed: numbers of the layers of the whole model that have experts, from 0. layers: this chunk's places among them;
    there may be none.
    """

    def __init__(self, model: Any, num_experts: int, routed: Sequence[int]) -> None:
        self.taps: list[RouterTap] = []
        self.layers: list[int] = []
        self._none = torch.empty(0, 0, model.config.moe_router_topk, dtype=choice_dtype(num_experts))
        for layer in model.decoder.layers:
            number = layer.layer_number - 1
            if number not in routed:
                continue
            tap = RouterTap(len(self.taps), num_experts)
            layer.mlp.router.router_replay = tap
            self.taps.append(tap)
            self.layers.append(routed.index(number))

    def begin(self) -> None:
        """Forget what an earlier pass has left, which may have failed half-way."""
        for tap in self.taps:
            tap.counts = tap.losses = None
            tap.again.clear()

    @contextmanager
    def told(self, told: RoutingPlan) -> Iterator[None]:
        """Round the forward pass of one block."""
        self._none = self._none.new_empty(len(told.num_rows), *self._none.shape[1:])
        for tap in self.taps:
            tap.told, tap.own = told, None
        try:
            yield
        finally:
            for tap in self.taps:
                tap.told = None

    def take_choices(self) -> Tensor:
        """Of the pass that was last: [T, layers, K] on the CPU, once. Raises RuntimeError where there are none."""
        found = [tap.own for tap in self.taps if tap.own is not None]
        for tap in self.taps:
            tap.own = None
        if len(found) != len(self.taps):
            raise RuntimeError("not every router of the chunk has taken down its choice")
        if not self.taps:
            return self._none
        return torch.stack(found, 1).to(choice_dtype(self.taps[0].num_experts)).cpu()

    def counts(self) -> Tensor | None:
        """int64 [layers, E]: tokens of rows that were sent to each expert since `begin`; None without a pass."""
        counts = [tap.counts for tap in self.taps if tap.counts is not None]
        return torch.stack(counts) if counts else None

    def losses(self) -> Tensor | None:
        """float32 [layers, 2]: this rank's share of the balancing losses since `begin`; None without a pass."""
        losses = [tap.losses for tap in self.taps if tap.losses is not None]
        return torch.stack(losses) if losses else None

    def must_be_done(self) -> None:
        """Raise RuntimeError where a pass that was to be run again was not."""
        left = max((len(tap.again) for tap in self.taps), default=0)
        if left:
            raise RuntimeError(f"{left} passes of a router were not run again before their backward pass")


def choice_dtype(num_experts: int) -> torch.dtype:
    """The type in which the number of an expert is kept and sent."""
    return torch.uint8 if num_experts <= 256 else torch.int16
