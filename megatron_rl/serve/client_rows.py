"""Rows of clients as the batches of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.serve.client_commands import Row

if TYPE_CHECKING:
    from megatron_rl.records import Batch


def batch_of(rows: Sequence[Row]) -> Batch:
    """Rows in which every token but the first counts, with the columns that losses read."""
    import torch

    from megatron_rl.records import Batch, ragged

    tokens = [torch.tensor(row.token_ids) for row in rows]
    batch = Batch(
        input_ids=ragged(tokens),
        sampled=ragged([torch.arange(len(row)) > 0 for row in tokens]),
        advantages=ragged([torch.tensor(row.weights, dtype=torch.float32) for row in rows]),
    )
    if rows[0].counted:
        batch.add(kept=ragged([torch.tensor(row.counted, dtype=torch.float32) for row in rows]))
    if rows[0].log_probs:
        batch.add(old_log_probs=ragged([torch.tensor(row.log_probs, dtype=torch.float32) for row in rows]))
    return batch
