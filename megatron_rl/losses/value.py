"""PPO's value loss, per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """0.5 * max((V - G)^2, (clip(V, V_old -+ c) - G)^2), as in OpenAI's PPO; all arguments [N].

    Returns (loss [N], clipped [N]: 1 where the clipped branch was the larger).
    """
    limited = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    plain_loss, limited_loss = (values - returns).square(), (limited - returns).square()
    return 0.5 * plain_loss.maximum(limited_loss), (limited_loss > plain_loss).float()
