"""Where the tokens of rows lie in a block of a pass, for what is known of every token: the experts it is sent to.

Legend: n rows of a block of b x S columns, N tokens of these rows, end to end; L layers, K experts to a token.
Megatron's routers see the columns of a block one after the other, and of each column its b rows: S x b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.records import row_lengths

if TYPE_CHECKING:
    from megatron_rl.experience.micro_batches import MicroBatch


@dataclass(frozen=True)
class RoutedTokens:
    """What a block knows of the tokens of its n rows, on the CPU.

    lengths: int64 [n], tokens of each. answered: bool [n], rows with a response; others fill up a split.
    experts: uint8 or int16 [sum(num_known), L, K] of the first tokens of each row, row after row; None: of none.
    num_known: int64 [n].
    """

    lengths: Tensor
    answered: Tensor
    experts: Tensor | None = None
    num_known: Tensor | None = None

    def none(self) -> RoutedTokens:
        """Of no row."""
        return RoutedTokens(self.lengths[:0], self.answered[:0])


def routed_tokens(
    experts: Tensor | None, input_ids: Tensor, response_lengths: Tensor, plan: Sequence[Sequence[int]]
) -> list[RoutedTokens]:
    """Those of every block of `plan`. experts: ragged [B, (T), L, K] or None; input_ids: ragged [B, (L)]."""
    lengths, blocks = row_lengths(input_ids), [torch.tensor(rows) for rows in plan]
    if experts is None:
        return [RoutedTokens(lengths[rows], response_lengths[rows] > 0) for rows in blocks]
    num_known, parts = row_lengths(experts), experts.unbind()
    return [
        RoutedTokens(
            lengths[rows], response_lengths[rows] > 0, torch.cat([parts[row] for row in rows.tolist()]), num_known[rows]
        )
        for rows in blocks
    ]


def places(block: MicroBatch) -> Tensor:
    """int64 [N]: where each token of the block's rows lies, as a place among the S x b that routers see.

    A token of a prompt that several rows have lies in one place for all of them.
    """
    lengths = known_tokens(block).lengths
    num_rows, width = block.input_ids.shape
    column = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    if block.segments is None:
        return column * num_rows + torch.arange(len(lengths)).repeat_interleave(lengths)
    given = block.prefixes[: len(lengths)]
    prefixes = torch.tensor([*given, *[(0, 0)] * (len(lengths) - len(given))], dtype=torch.int64).view(-1, 2)
    first, shared = (part.repeat_interleave(lengths) for part in prefixes.T)
    sizes = torch.tensor(block.segments[: len(lengths)], dtype=torch.int64)  # with what rounds them up
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(lengths)
    return torch.where(column < shared, first + column, starts + column - shared)


def known_tokens(block: MicroBatch) -> RoutedTokens:
    """Raises ValueError where the block was cut without."""
    if block.tokens is None:
        raise ValueError("the block was cut without its rows' tokens")
    return block.tokens


def num_rows_at(block: MicroBatch) -> Tensor:
    """int64 [S * b]: of the rows with a response, how many have their token in each place."""
    tokens = known_tokens(block)
    found = places(block)[tokens.answered.repeat_interleave(tokens.lengths)]
    return found.bincount(minlength=block.input_ids.numel())


def places_of_rows(block: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(place [n], row [n], lengths [rows]), int64, of every token of the rows with a response, row after row."""
    tokens = known_tokens(block)
    found = places(block)[tokens.answered.repeat_interleave(tokens.lengths)]
    lengths = tokens.lengths[tokens.answered]
    return found, torch.arange(len(lengths)).repeat_interleave(lengths), lengths


def told_experts(block: MicroBatch, layers: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Of some layers (experts [S * b, layers, K], whether they are known, bool [S * b]); None where none are."""
    tokens = known_tokens(block)
    if tokens.experts is None or tokens.num_known is None:
        return None
    there = places(block)[first_of_rows(tokens.num_known, tokens.lengths)]
    experts = tokens.experts.new_zeros(block.input_ids.numel(), len(layers), tokens.experts.shape[-1])
    experts[there] = tokens.experts[:, list(layers)]
    known = torch.zeros(len(experts), dtype=torch.bool)
    known[there] = True
    return experts, known


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
