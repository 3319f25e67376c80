"""The experts that every token of a block's rows is sent to, as far as they are known. Pure.

Legend: n rows of a block, N tokens of these rows, end to end; L layers, K experts to a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.records import Batch, conversations, elements_of, row_lengths, rows_of


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens of the n rows of a block, and their experts as far as they are known; on the CPU.

    lengths: int64 [n], tokens of each. sequences: int64, of each of their conversations. answered: bool [n], rows with
    a sampled token; others fill up a split.
    experts: uint8 or int16 [sum(num_known), L, K] of the tokens at `routed`, row after row; None: of none. num_known:
    int64 [n].
    """

    lengths: Tensor
    sequences: Tensor
    answered: Tensor
    experts: Tensor | None = None
    num_known: Tensor | None = None

    @property
    def routed(self) -> Tensor:
        """int64 [sum(num_known)]: the tokens whose experts are known, among the N; none where there are no experts."""
        if self.num_known is None:
            return self.lengths[:0]
        return routed_places(self.num_known, self.lengths, self.sequences)

    def none(self) -> RoutedTokens:
        """Return the tokens of no row."""
        if self.experts is None or self.num_known is None:
            return RoutedTokens(self.lengths[:0], self.sequences[:0], self.answered[:0])
        no_experts = (self.experts[:0], self.num_known[:0])
        return RoutedTokens(self.lengths[:0], self.sequences[:0], self.answered[:0], *no_experts)


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
    order, (num_parts, parts) = torch.tensor(list(rows)), conversations(batch)
    lengths, experts = row_lengths(batch["input_ids"])[order], rows_of(batch["routed_experts"], order)
    known = experts.values().flatten(1).contiguous().view(torch.uint8)
    of_tokens = known.new_zeros(int(lengths.sum()), known.shape[1])
    of_tokens[routed_places(row_lengths(experts), lengths, parts[elements_of(order, num_parts)])] = known
    return of_tokens


def routed_places(num_known: Tensor, lengths: Tensor, sequences: Tensor) -> Tensor:
    """int64 [sum(num_known)]: the tokens whose experts are known, of rows of `lengths` tokens end to end.

    They are all tokens of a row, as a router of the trainer has seen them, or the first of those that an engine reads:
    it does not read the last token of a conversation, which nothing follows. sequences: int64, the tokens of each
    conversation, row after row. Raises ValueError for rows that are too short for their experts.
    """
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    is_read = torch.ones(len(rows), dtype=torch.bool)
    is_read[sequences.cumsum(0) - 1] = False
    is_read |= (num_known == lengths)[rows]
    so_far = torch.nn.functional.pad(is_read.cumsum(0), (1, 0))
    before = so_far[lengths.cumsum(0) - lengths]
    places = (is_read & (so_far[1:] - before[rows] <= num_known[rows])).nonzero().flatten()
    if len(places) != int(num_known.sum()):
        raise ValueError(
            f"rows of {lengths.tolist()} tokens, in conversations of {sequences.tolist()}, cannot have experts of "
            f"{num_known.tolist()}"
        )
    return places


def num_others(theirs: Tensor, num_known: Tensor, own: Tensor, lengths: Tensor, sequences: Tensor) -> Tensor:
    """int64 [n]: of each row's known experts, over some layers, how many are not among those that are `own`.

    theirs [sum(num_known), L, K], own [sum(lengths), L, K] of all; the others as `routed_places` takes them.
    """
    mine = own[routed_places(num_known, lengths, sequences)]
    others = torch.zeros(len(theirs), dtype=torch.int64)
    for layer in range(theirs.shape[1]):
        is_own = (theirs[:, layer, :, None] == mine[:, layer, None, :]).any(-1)
        others += (~is_own).sum(-1)
    rows = torch.arange(len(lengths)).repeat_interleave(num_known)
    return torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, rows, others)
