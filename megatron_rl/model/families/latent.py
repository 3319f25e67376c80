"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): its sizes, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Q_RANK = "q_lora_rank"
DEFAULT_Q_RANK = 1536
"""transformers' and vLLM's where config.json has none; an explicit null is a query made of the hidden state."""
SIZE_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class LatentAttention:
    """q_rank, kv_rank: elements of the latent vectors of queries (None: there is none) and of keys and values.

    nope, rope, value: elements per head of a query's and a key's part that does not turn and that does, and of a value.
    The part of a key that turns is made of the hidden state, one for all heads.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def query(self) -> int:
        """Elements of a query's and a key's head."""
        return self.nope + self.rope

    @property
    def cached(self) -> int:
        """Elements that generation keeps of a token and layer, for all heads and on every TP rank."""
        return self.kv_rank + self.rope

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any]) -> LatentAttention:
        """From the content of a config.json. Raises KeyError when a number is not there."""
        return cls(settings.get(Q_RANK, DEFAULT_Q_RANK), *(settings[key] for key in SIZE_KEYS))
