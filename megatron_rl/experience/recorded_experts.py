"""The experts that every token of a block's rows is sent to, as far as they are known. Pure.

Legend: n rows of a block, N tokens of these rows, end to end; L layers, K experts to a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.records import Batch, row_lengths


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens of the n rows of a block, and their experts as far as they are known; on the CPU.

    lengths: int64 [n], tokens of each. sequences: int64, of each of their conversations. answered: bool [n], rows with
    a sampled token; others fill up a split.
    experts: uint8 or int16 [sum(num_known), L, K] of the first tokens of each row, row after row; None: of none.
    num_known: int64 [n].
    """

    lengths: Tensor
    sequences: Tensor
    answered: Tensor
    experts: Tensor | None = None
    num_known: Tensor | None = None

    def none(self) -> RoutedTokens:
        """Return the tokens of no row."""
        return RoutedTokens(self.lengths[:0], self.sequences[:0], self.answered[:0])


def routed_tokens(batch: Batch, plan: Sequence[Sequence[int]], sequences: Sequence[Tensor]) -> list[RoutedTokens]:
    """Return the tokens of every block, with `routed_experts` where the batch has them.

    sequences: of every block, the lengths of its rows' conversations.
    """
    experts, lengths = batch.get("routed_experts"), row_lengths(batch["input_ids"])
    answered, blocks = batch.num_sampled > 0, [torch.tensor(rows) for rows in plan]
    if experts is None:
        return [
            RoutedTokens(lengths[rows], parts, answered[rows]) for rows, parts in zip(blocks, sequences, strict=True)
        ]
    num_known, known = row_lengths(experts), experts.unbind()
    return [
        RoutedTokens(
            lengths[rows], parts, answered[rows], torch.cat([known[row] for row in rows.tolist()]), num_known[rows]
        )
        for rows, parts in zip(blocks, sequences, strict=True)
    ]


def expert_bytes(batch: Batch, rows: Sequence[int]) -> Tensor:
    """uint8 [tokens of these rows, n]: of every token, row after row, the bytes of its experts; 0 where they are not
    known.
    """
    lengths, known = row_lengths(batch["input_ids"]).tolist(), batch["routed_experts"].unbind()
    parts = [known[row].flatten(1).contiguous().view(torch.uint8) for row in rows]
    return torch.cat(
        [
            torch.nn.functional.pad(part, (0, 0, 0, lengths[row] - len(part)))
            for row, part in zip(rows, parts, strict=True)
        ]
    )


def first_of_rows(counts: Tensor, lengths: Tensor) -> Tensor:
    """int64: of rows of `lengths` elements end to end, the first `counts` of each."""
    starts = lengths.cumsum(0) - lengths - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + starts.repeat_interleave(counts)


def num_others(theirs: Tensor, num_known: Tensor, own: Tensor, lengths: Tensor) -> Tensor:
    """int64 [n]: of each row's known experts, over some layers, how many are not among those that are `own`.

    theirs [sum(num_known), L, K] of the first tokens of each row; own [sum(lengths), L, K] of all.
    """
    mine = own[first_of_rows(num_known, lengths)]
    others = torch.zeros(len(theirs), dtype=torch.int64)
    for layer in range(theirs.shape[1]):
        is_own = (theirs[:, layer, :, None] == mine[:, layer, None, :]).any(-1)
        others += (~is_own).sum(-1)
    rows = torch.arange(len(lengths)).repeat_interleave(num_known)
    return torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, rows, others)
