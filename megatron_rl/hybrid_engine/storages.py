"""The memory under tensors, as bytes."""

from __future__ import annotations

import torch


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A uint8 view [num_bytes] of the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
