"""How many logits exist at once: arithmetic without torch, for the head and for the memory plan."""

from __future__ import annotations

FEWEST_LOGITS = 1 << 20
"""Logits that may exist at once however small the model is: 4 MiB in float32."""


def chunk_tokens(hidden_size: int, num_rows: int) -> int:
    """Tokens of which the logits exist at once.

    H / 4, so that a chunk's logits are a quarter of the weight, yet the weight is read seldom enough to keep matrix
    units busy; more where the logits of those would be few.
    """
    return max(1, hidden_size // 4, FEWEST_LOGITS // num_rows)
