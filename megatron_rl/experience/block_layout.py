"""How the sequences of a block are arranged: packed end to end, padded to the longest, or as a tree of common prefixes.

Legend: T tokens of C sequences, end to end; b x S positions of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.experience.prefix_tree import PrefixTree
from megatron_rl.records import places_in_rows


@dataclass(frozen=True)
class BlockLayout:
    """The layout of one block.

    sampled: bool [T]; lengths: int64 [C], tokens of each sequence. With `tree` they are a
    tree, with remove_padding packed (see `packed`), else padded.
    """

    sampled: Tensor
    lengths: Tensor
    remove_padding: bool
    column_multiple: int = 1
    segment_multiple: int = 1
    prefixes: tuple[tuple[int, int], ...] | None = None
    tree: PrefixTree | None = None

    def laid(self, tokens: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
        """Return numbers of the tokens, int64 [T], where the block has them: (int64 [b, S], 0 for filler, bool [b,
        S - 1]: whether the next token is a sampled one, unused with a tree, lengths of segments, None where padded).
        """
        if self.tree is not None:
            input_ids, segments = laid_as_tree(tokens, self.tree, self.column_multiple)
            return input_ids, torch.zeros(1, input_ids.shape[1] - 1, dtype=torch.bool), segments
        rows = (tokens, self.sampled, self.lengths)
        if self.remove_padding:
            return packed(*rows, self.column_multiple, self.segment_multiple, self.prefixes)
        return *padded(*rows, self.column_multiple), None


def padded(tokens: Tensor, sampled: Tensor, lengths: Tensor, column_multiple: int) -> tuple[Tensor, Tensor]:
    """Return (input_ids int64 [C, S], predicts_sampled bool [C, S - 1]): one sequence per line, then filler."""
    width = round_up(int(lengths.max()), column_multiple)
    starts = torch.arange(len(lengths)) * width
    input_ids, is_sampled = placed(tokens, sampled, lengths, starts, len(lengths) * width)
    return input_ids.view(-1, width), is_sampled.view(-1, width)[:, 1:]


def packed(
    tokens: Tensor,
    sampled: Tensor,
    lengths: Tensor,
    column_multiple: int,
    segment_multiple: int = 1,
    prefixes: tuple[tuple[int, int], ...] | None = None,
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return (input_ids int64 [1, S], predicts_sampled bool [1, S - 1], lengths of segments) of sequences end to end.

    Each sequence is a segment, rounded up to segment_multiple with filler at its end; filler that rounds the block up
    to column_multiple is one more segment. prefixes: from `shared_prefixes`; as many tokens as they say are left out at
    the beginning of each sequence.
    """
    if prefixes is not None:
        num_left_out = torch.tensor([length for _, length in prefixes])
        stays = places_in_rows(lengths) >= num_left_out.repeat_interleave(lengths)
        tokens, sampled, lengths = tokens[stays], sampled[stays], lengths - num_left_out
    rounded = -(-lengths // segment_multiple) * segment_multiple
    starts, segments = rounded.cumsum(0) - rounded, filled_up(rounded.tolist(), column_multiple)
    input_ids, is_sampled = placed(tokens, sampled, lengths, starts, sum(segments))
    return input_ids[None], is_sampled[None, 1:], segments


def placed(
    tokens: Tensor, sampled: Tensor, lengths: Tensor, starts: Tensor, num_positions: int
) -> tuple[Tensor, Tensor]:
    """Return (tokens int64 [num_positions], sampled bool [num_positions]) with each sequence at its start, int64 [C];
    filler is 0 and not sampled.
    """
    position = torch.arange(len(tokens)) + (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    input_ids, is_sampled = tokens.new_zeros(num_positions), torch.zeros(num_positions, dtype=torch.bool)
    input_ids[position], is_sampled[position] = tokens, sampled
    return input_ids, is_sampled


def laid_as_tree(tokens: Tensor, tree: PrefixTree, column_multiple: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return (input_ids int64 [1, S], lengths of segments) of rows as a tree; filler at the end is a segment too."""
    segments = filled_up(tree.segments, column_multiple)
    input_ids = tokens.new_zeros(1, sum(segments))
    input_ids[0, tree.columns] = tokens
    return input_ids, segments


def shared_prefixes(
    prompts: Sequence[int], lengths: Sequence[int], num_prompt_tokens: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return for each packed row (first position, length) of the prompt that it shares with an earlier row.

    prompts: the number of each row's prompt. The shared part is the prompt without its last token, which another token
    follows in every row; length 0 for the first row of a prompt.
    """
    first_position: dict[int, int] = {}
    prefixes, position = [], 0
    for prompt, length, num_prompt in zip(prompts, lengths, num_prompt_tokens, strict=True):
        num_shared = max(num_prompt - 1, 0) if prompt in first_position else 0
        prefixes.append((first_position.setdefault(prompt, position) if num_shared else 0, num_shared))
        first_position.setdefault(prompt, position)
        position += length - num_shared
    return tuple(prefixes)


def filled_up(segments: Sequence[int], column_multiple: int) -> tuple[int, ...]:
    """Return lengths of segments that add up to a multiple of `column_multiple`: filler is one more, if needed."""
    filler = -sum(segments) % column_multiple
    return (*segments, filler) if filler else tuple(segments)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple
