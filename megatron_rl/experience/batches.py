"""Cut experience into mini-batches, of which each makes one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def mini_batch_rows(num_rows: int, mini_batch_size: int, num_epochs: int, seed: int | None) -> Iterator[Tensor]:
    """Row numbers of each optimizer step: every row once per epoch, in a new seeded order (None: as they are).

    The last mini-batch of an epoch is smaller when `mini_batch_size` does not divide `num_rows`. The split does not
    know the layout, so the same rows meet in one optimizer step whatever TP, PP and DP are.
    """
    for epoch in range(num_epochs):
        rows = torch.arange(num_rows)
        if seed is not None:
            rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed + epoch))
        yield from rows.split(mini_batch_size)
