"""Record, count and replay the expert choices of routers.

A Megatron router asks its `router_replay` object for the top K, where it has one. Megatron's own object keeps one list
of all routers of the process, and the caller switches a mode to pair a recomputed forward pass with its first one. Here
each chunk of the actor has objects of its own, and a router recognises a recomputed forward pass by itself.

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

from megatron_rl.model.decoder import layers_of
from megatron_rl.model.router_balance import Balance

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RoutingPlan:
    """Expert choices to replay in one forward pass of a chunk, and what to record of it.

    num_rows: int64 [T], the number of trained rows that have the token: 0 for filler, several for a prompt that is
    computed once for them. trains: a backward pass follows. records: keep the router's own choice. experts:
    [T, layers, K], the experts of the tokens where `known`, bool [T], is true; None: each router chooses. balance: the
    rows of the balancing losses; None: there are no such losses.
    """

    num_rows: Tensor
    trains: bool
    records: bool = False
    experts: Tensor | None = None
    known: Tensor | None = None
    balance: Balance | None = None


class RouterTap:
    """Replace the top K of one router. layer: the router's place among the routers of its chunk.

    When a pass trains, a forward pass without gradients is recomputed with gradients before its backward pass. The k-th
    recomputed pass is the k-th first pass, because blocks go backward through a chunk in their forward order.
    """

    def __init__(self, layer: int, num_experts: int) -> None:
        self.layer, self.num_experts = layer, num_experts
        self.plan: RoutingPlan | None = None
        self.own: Tensor | None = None
        self.counts: Tensor | None = None
        self.losses: Tensor | None = None
        self.to_recompute: deque[RoutingPlan] = deque()
        self._current: RoutingPlan | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose experts; Megatron's router calls this. scores [T, E] -> (scores, numbers) of the experts, both [T, K].

        Raises RuntimeError when the plan of the pass has another number of tokens.
        """
        assert default_compute_topk is not None  # Megatron always gives it
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        plan, is_first = self._next()
        self._current = plan
        if plan is None:
            return values, own
        if len(plan.num_rows) != len(scores):
            raise RuntimeError(f"a router sees {len(scores)} tokens where its pass is about {len(plan.num_rows)}")
        chosen = own if plan.experts is None else self._replayed(plan, own)
        if is_first:
            self.own = own if plan.records else None
            self._count(chosen, plan.num_rows)
        return (values, own) if plan.experts is None else (scores.gather(1, chosen), chosen)

    def balance(self) -> Balance | None:
        """The balancing losses of the last pass; None when it has none or runs without gradients."""
        return self._current.balance if self._current is not None and torch.is_grad_enabled() else None

    def note_losses(self, losses: Tensor) -> None:
        """Add up this rank's share of the losses, float32 [2], of all passes."""
        self.losses = losses if self.losses is None else self.losses + losses

    def _next(self) -> tuple[RoutingPlan | None, bool]:
        """Return the plan of this pass, and whether it is the first pass of its block."""
        if self.to_recompute and torch.is_grad_enabled():
            return self.to_recompute.popleft(), False
        if self.plan is not None and self.plan.trains and not torch.is_grad_enabled():
            self.to_recompute.append(self.plan)
        return self.plan, True

    def _replayed(self, plan: RoutingPlan, own: Tensor) -> Tensor:
        assert plan.experts is not None and plan.known is not None
        return torch.where(plan.known[:, None], plan.experts[:, self.layer].long(), own)

    def _count(self, chosen: Tensor, num_rows: Tensor) -> None:
        if self.counts is None:
            self.counts = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device)
        # Unlike bincount it waits for no device.
        self.counts.scatter_add_(0, chosen.flatten(), num_rows[:, None].expand_as(chosen).flatten())


class ChunkRouters:
    """The routers of one chunk of a model. The constructor puts a tap into each router.

    routed: numbers of the layers of the whole model that have experts, from 0. layers: the indices in `routed` of this
    chunk's layers; there may be none.
    """

    def __init__(self, model: Any, num_experts: int, routed: Sequence[int]) -> None:
        self.taps: list[RouterTap] = []
        self.layers: list[int] = []
        self._none = torch.empty(0, 0, model.config.moe_router_topk, dtype=choice_dtype(num_experts))
        for number, layer in layers_of(model):
            if number not in routed:
                continue
            tap = RouterTap(len(self.taps), num_experts)
            layer.mlp.router.router_replay = tap
            self.taps.append(tap)
            self.layers.append(routed.index(number))

    def begin(self) -> None:
        """Clear the state of an earlier pass, which may have failed half-way."""
        for tap in self.taps:
            tap.counts = tap.losses = None
            tap.to_recompute.clear()

    @contextmanager
    def using(self, plan: RoutingPlan) -> Iterator[None]:
        """Use a plan during the forward pass of one block."""
        self._none = self._none.new_empty(len(plan.num_rows), *self._none.shape[1:])
        for tap in self.taps:
            tap.plan, tap.own = plan, None
        try:
            yield
        finally:
            for tap in self.taps:
                tap.plan = None

    def take_choices(self) -> Tensor:
        """Take the choices of the last pass: [T, layers, K] on the CPU. Raises RuntimeError if any is missing."""
        choices = [tap.own for tap in self.taps if tap.own is not None]
        for tap in self.taps:
            tap.own = None
        if len(choices) != len(self.taps):
            raise RuntimeError("not every router of the chunk has recorded its choice")
        if not self.taps:
            return self._none
        return torch.stack(choices, 1).to(choice_dtype(self.taps[0].num_experts)).cpu()

    def counts(self) -> Tensor | None:
        """int64 [layers, E]: tokens of rows that were sent to each expert since `begin`; None without a pass."""
        counts = [tap.counts for tap in self.taps if tap.counts is not None]
        return torch.stack(counts) if counts else None

    def losses(self) -> Tensor | None:
        """float32 [layers, 2]: this rank's share of the balancing losses since `begin`; None without a pass."""
        losses = [tap.losses for tap in self.taps if tap.losses is not None]
        return torch.stack(losses) if losses else None

    def must_be_done(self) -> None:
        """Raise RuntimeError when a pass has not been recomputed that should have been."""
        left = max((len(tap.to_recompute) for tap in self.taps), default=0)
        if left:
            raise RuntimeError(f"{left} passes of a router were not run again before their backward pass")


def choice_dtype(num_experts: int) -> torch.dtype:
    """The dtype in which expert numbers are kept and sent."""
    return torch.uint8 if num_experts <= 256 else torch.int16
