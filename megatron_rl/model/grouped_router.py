"""A router that chooses experts by scores in groups (DeepSeek-V2, arXiv:2405.04434; V3, arXiv:2412.19437).

Megatron's own router scores a group by its best topk / groups_per_token experts and always divides sigmoid scores by
their sum. Here the family says both.

Legend: T tokens, E experts of the whole layer, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.families import CORRECTION, Routing
from megatron_rl.model.router_balance import BalancedRouter


class GroupedRouter(BalancedRouter):
    """Megatron's router with the choice and the weights of `Routing.scoring`.

    `correction_bias` [E], float32, is added to scores for the choice alone. It is not a parameter: no loss changes it.
    Where the run asks for it, the load of the experts changes it (`roles/expert_bias.py`).
    """

    def __init__(self, *args: Any, routing: Routing, **options: Any) -> None:
        """routing: with scoring."""
        super().__init__(*args, **options)
        assert routing.scoring is not None
        self.groups, self.scoring = routing, routing.scoring
        bias = None if self.scoring.bias is None else torch.zeros(routing.num_experts, dtype=torch.float32)
        self.register_buffer(CORRECTION, bias)

    def shares(self, logits: Tensor) -> Tensor:
        """float32 [T, E] -> scores that add up to 1."""
        scores = self._scores(logits)
        return scores if self.scoring.function == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.scoring.function == "softmax" else logits.sigmoid()

    def choose(self, logits: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> (weights [T, E], 0 where an expert is not the token's; bool [T, E])."""
        logits = logits.flatten(0, 1)
        scores = self._scores(logits.float())
        bias = getattr(self, CORRECTION)
        ranked = scores.detach() if bias is None else scores.detach() + bias
        ranked = in_best_groups(ranked, self.groups.num_groups, self.groups.groups_per_token, self.scoring.best)
        if self.router_replay is None:
            chosen = ranked.topk(self.topk, dim=-1).indices
        else:
            _, chosen = self.router_replay.get_replay_topk(ranked, self.topk, None, None, _largest)
        weights = scores.gather(1, chosen)
        if self.groups.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = (weights * self.groups.scale).to(logits.dtype)
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        return torch.zeros_like(logits).scatter(1, chosen, weights), is_chosen


def in_best_groups(scores: Tensor, num_groups: int, per_token: int, best: int) -> Tensor:
    """Set scores [T, E] to minus infinity outside of a token's `per_token` best groups of E / num_groups experts.

    The score of a group is the sum of its `best` largest scores.
    """
    if per_token >= num_groups:
        return scores
    grouped = scores.unflatten(-1, (num_groups, -1))
    best_groups = grouped.topk(best, dim=-1).values.sum(-1).topk(per_token, dim=-1).indices
    is_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best_groups, False)
    limited: Tensor = grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(1)
    return limited


def _largest(scores: Tensor, topk: int, *unused: Any) -> tuple[Tensor, Tensor]:
    values, indices = scores.topk(topk, dim=-1)
    return values, indices
