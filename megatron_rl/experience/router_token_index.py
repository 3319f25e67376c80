"""Where the tokens of a block's rows lie among the places that routers see, and which experts they had. Pure.

Legend: n rows of a block of b x S columns, N tokens of these rows, end to end; L layers, K experts to a token.
Megatron's routers see the columns of a block one after the other, and of each column its b rows: S x b.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.experience.recorded_experts import RoutedTokens
from megatron_rl.records import places_in_rows


def places(block: MicroBatch) -> Tensor:
    """int64 [N]: where each token of the block's rows is, as a place among the S x b that routers see.

    A token of a prompt that several rows have is in one place for all of them.
    """
    if block.tree is not None:
        return block.tree.columns
    lengths = known_tokens(block).sequences
    num_rows, width = block.input_ids.shape
    column = places_in_rows(lengths)
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
    """int64 [S * b]: of the rows with a sampled token, how many have their token in each place."""
    tokens = known_tokens(block)
    taken = places(block)[tokens.answered.repeat_interleave(tokens.lengths)]
    return taken.bincount(minlength=block.input_ids.numel())


def places_of_rows(block: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(place [n], row [n], lengths [rows]), int64, of every token of the rows with a sampled token, row after row."""
    tokens = known_tokens(block)
    taken = places(block)[tokens.answered.repeat_interleave(tokens.lengths)]
    lengths = tokens.lengths[tokens.answered]
    return taken, torch.arange(len(lengths)).repeat_interleave(lengths), lengths


def recorded_experts(block: MicroBatch, layers: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """(experts of some layers [S * b, layers, K], bool [S * b]: whether they are known), or None if none are."""
    tokens = known_tokens(block)
    if tokens.experts is None:
        return None
    there = places(block)[tokens.routed]
    experts = tokens.experts.new_zeros(block.input_ids.numel(), len(layers), tokens.experts.shape[-1])
    experts[there] = tokens.experts[:, list(layers)]
    known = torch.zeros(len(experts), dtype=torch.bool)
    known[there] = True
    return experts, known
