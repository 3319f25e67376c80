"""Cut a mini-batch into micro-batches, one pass through the model each: which rows together, and in which layout.

    lengths --MicroBatching.plan--> rows of each block --micro_batches--> blocks, packed or padded

Rows are grouped by number (`ppo_micro_batch_size_per_gpu`) or by tokens (`use_dynamic_bsz`), and are packed end to end
(`use_remove_padding`) or padded to the longest. In a packed micro-batch, rows with the same prompt may share one copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_rl.experience.prefix_tree import PrefixTree, prefix_tree
from megatron_rl.experience.recorded_experts import RoutedTokens, expert_bytes, routed_tokens
from megatron_rl.parallel.balance import SequenceWork, pack, together
from megatron_rl.parallel.zigzag import ContextShare
from megatron_rl.records import Batch, conversations, elements_of, first_true, places_in_rows, row_lengths

NO_FIELDS = ("input_ids", "sampled", "conversation_starts", "routed_experts")
"""Columns that are no numbers of sampled tokens."""


@dataclass(frozen=True)
class MicroBatching:
    """How rows are joined into the micro-batches of one role.

    num_rows: rows of a micro-batch, in the order of the batch. max_tokens: group rows by their tokens instead, in as
    few micro-batches as possible and of equal `work`; None: by number. remove_padding: pack rows end to end. as_tree:
    use the prefix-tree layout (`prefix_tree.py`), and group rows by the nodes that they share.
    """

    num_rows: int
    max_tokens: int | None = None
    remove_padding: bool = True
    as_tree: bool = False
    work: SequenceWork = SequenceWork(attention_parity=float("inf"))

    @property
    def is_dynamic(self) -> bool:
        """Whether lengths decide how many rows a block has."""
        return self.max_tokens is not None

    def plan(
        self, lengths: Sequence[int], num_blocks: int = 1, multiple: int = 1, prompts: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Return the rows of each block, every row once, for rows of `lengths` tokens.

        Only dynamic blocks follow num_blocks, their least number, and multiple, which divides it; there are never more
        blocks than rows. prompts: the number of each row's prompt; dynamic blocks keep rows of one prompt together as
        far as that takes no more blocks.
        """
        by_rows = self._join([[row] for row in range(len(lengths))], lengths, num_blocks, multiple)
        if self.max_tokens is None or prompts is None:
            return by_rows
        most = max(Counter(prompts).values())
        while most > 1:
            parts = together(prompts, lengths, most, self.max_tokens)
            if len(parts) >= max(num_blocks, multiple):
                blocks = self._join(parts, lengths, num_blocks, multiple)
                if len(blocks) <= len(by_rows):
                    return [sorted(rows) for rows in blocks]
            most //= 2
        return by_rows

    def plan_units(
        self, lengths: Sequence[int], sizes: Sequence[int], num_blocks: int = 1, multiple: int = 1
    ) -> list[list[int]]:
        """Return the rows of each block where units, of `sizes` neighbouring rows each, stay in one block.

        `num_rows` counts units. Raises ValueError for a unit of more than `max_tokens`.
        """
        ends = accumulate(sizes)
        units = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return self._join(units, lengths, num_blocks, multiple)

    def _join(
        self, units: Sequence[Sequence[int]], lengths: Sequence[int], num_blocks: int, multiple: int
    ) -> list[list[int]]:
        """The rows of each block, where the rows of a unit share one."""
        if self.max_tokens is None:
            numbers = range(len(units))
            blocks = [list(numbers[first : first + self.num_rows]) for first in numbers[:: self.num_rows]]
        else:
            work = self.work(lengths)
            tokens = [sum(lengths[row] for row in rows) for rows in units]
            works = [sum(work[row] for row in rows) for rows in units]
            blocks = pack(tokens, works, self.max_tokens, num_blocks, multiple)
        return [[row for unit in block for row in units[unit]] for block in blocks]


@dataclass
class MicroBatch:
    """Rows for one pass through the model.

    Legend: n rows with N sampled tokens, in a micro-batch of b x S positions. The conversations of a row follow one
    another, each as a sequence of its own. In the prefix-tree layout (`tree`) M pairs take the place of the N tokens.
    """

    input_ids: Tensor
    """int64 [b, S]. Padded: one sequence per line, aligned left, filled up with 0. Packed: b = 1, sequences end to end,
    then filler."""
    predicts_sampled: Tensor
    """bool [b, S - 1] on the CPU: whether the *next* token is a sampled one, of the same row. Unused with `tree`."""
    num_sampled: Tensor
    """int64 [n]: sampled tokens of each row."""
    rows: Tensor
    """int64 [n]: index of each row in the batch, in the order of this micro-batch."""
    fields: dict[str, Tensor]
    """The batch's other columns of sampled tokens, of these rows, flattened row by row to [N, ...]."""
    segments: tuple[int, ...] | None = None
    """Lengths of the packed sequences, filler included; they add up to S. None when padded."""
    prefixes: tuple[tuple[int, int], ...] = ()
    """Per packed sequence that shares its prompt: (first position, length) of that prompt without its last token,
    elsewhere in the micro-batch; length 0 where a sequence has its whole prompt."""
    share: ContextShare | None = None
    """Part that this rank reads under context parallelism."""
    tokens: RoutedTokens | None = None
    """Router choices of the rows' tokens, where experts are replayed or recorded."""
    num_sharing: int | None = None
    """Context-parallel ranks that share the micro-batch; None: all of them."""
    is_reported: bool = True
    """Whether this rank reports the results: one of the ranks that share the micro-batch does."""
    predict_index: Tensor | None = None
    """int64 [N]: flat position (0 to b * S - 1) whose hidden state predicts each sampled token; [M], of its own
    positions, with `tree`. None until the micro-batch is on the device."""
    tree: PrefixTree | None = None
    """Prefix-tree layout of the rows, with its own `segments`. `targets` and `scored` then have M pairs instead of N
    tokens; `whole` and `part` convert between them."""

    @property
    def targets(self) -> Tensor:
        """int64 [N]: the sampled tokens, row by row; of a share those that are predicted there, [n]; of a tree [M]."""
        targets = self.input_ids.flatten()[self.predicting() + 1] if self.tree is None else self.tree.targets
        return targets if self.share is None else targets[self.share.numbers]

    def scored(self, output: Tensor) -> Tensor:
        """output [b, S, ...] of a model -> [N, ...], where the sampled tokens are predicted, as `targets`.

        Of a share output is [b, its columns, ...], and [n, ...] comes out; of a tree [M, ...].
        """
        return output.flatten(0, 1).index_select(0, self.predicting() if self.share is None else self.share.places)

    def prev_index(self) -> Tensor:
        """Return int64 [b * S], on the CPU: position of the previous token of the same sequence; -1 for its first
        token.

        For the whole micro-batch, not for this rank's share. Not for the prefix-tree layout.
        """
        before = torch.arange(-1, self.input_ids.numel() - 1)
        if self.segments is None:
            before[:: self.input_ids.shape[1]] = -1
            return before
        starts = [0, *accumulate(self.segments)][:-1]
        before[starts] = -1
        for start, (first, length) in zip(starts, self.prefixes, strict=False):
            if length:
                before[start] = first + length - 1
        return before

    def predicting(self) -> Tensor:
        """Return `predict_index`, computed if the micro-batch has not been moved to a device."""
        if self.predict_index is not None:
            return self.predict_index
        if self.tree is not None:
            return self.tree.places
        return torch.nn.functional.pad(self.predicts_sampled, (0, 1)).flatten().nonzero()[:, 0]

    def whole(self, values: Tensor) -> Tensor:
        """values [n, ...] of the tokens in `targets` -> [N, ...], of all of the block's.

        All context-parallel ranks must call, and get the same.
        """
        of_all = values if self.share is None else self.share.whole(values)
        return of_all if self.tree is None else self.tree.whole(of_all)

    def part(self, values: Tensor) -> Tensor:
        """values [N, ...] -> those of the tokens in `targets`."""
        of_pairs = values if self.tree is None else self.tree.part(values)
        return of_pairs if self.share is None else of_pairs[self.share.numbers]

    def wide(self, name: str) -> Tensor:
        """A column of several numbers a token [N, ...], on the block's device, where that of all blocks may not fit."""
        return self.fields[name].to(self.input_ids.device)

    @property
    def kept(self) -> Tensor:
        """float32 [N]: 1 for each sampled token that counts in a loss; all of them where the batch does not say."""
        if "kept" in self.fields:
            return self.fields["kept"]
        num_tokens = len(self.predicting() if self.tree is None else self.tree.pair_of_token)
        return torch.ones(num_tokens, device=self.input_ids.device)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a pass reads on the device from its beginning on, by name: all but `wide` columns."""
        named = {"input_ids": self.input_ids, "num_sampled": self.num_sampled, "rows": self.rows}
        of_share = {} if self.share is None else {f"share.{name}": x for name, x in self.share.tensors().items()}
        of_tree = {} if self.tree is None else {f"tree.{name}": x for name, x in self.tree.tensors().items()}
        fields = {f"fields.{name}": field for name, field in self.fields.items() if field.dim() == 1}
        return named | {"predict_index": self.predicting()} | of_share | of_tree | fields

    def with_tensors(self, moved: Mapping[str, Tensor]) -> MicroBatch:
        """Return the block with other tensors in place of those that `tensors` has, on the device of a pass."""
        changed: dict[str, Any] = {name: moved[name] for name in ("input_ids", "num_sampled", "rows", "predict_index")}
        if self.share is not None:
            of_share: dict[str, Any] = {name: moved[f"share.{name}"] for name in self.share.tensors()}
            changed["share"] = replace(self.share, **of_share)
        if self.tree is not None:
            changed["tree"] = self.tree.with_tensors({name: moved[f"tree.{name}"] for name in self.tree.tensors()})
        fields = {name: moved.get(f"fields.{name}", field) for name, field in self.fields.items()}
        return replace(self, **changed, fields=fields)

    def neutral(self) -> MicroBatch:
        """A block of the same shape without any row: it runs like this one and adds nothing to a loss."""
        return replace(
            self,
            input_ids=self.input_ids * 0,
            predicts_sampled=torch.zeros_like(self.predicts_sampled),
            num_sampled=self.num_sampled[:0],
            rows=self.rows[:0],
            fields={name: field[:0] for name, field in self.fields.items()},
            segments=self.segments if self.tree is None else (self.input_ids.shape[1],),
            share=None,
            tree=None,
            tokens=None if self.tokens is None else self.tokens.none(),
        )

    def idle(self, num_columns: int) -> MicroBatch:
        """Return a neutral block of one packed segment of that many columns, which this rank does not share."""
        nothing = self.neutral()
        return replace(
            nothing,
            input_ids=nothing.input_ids.new_zeros(1, num_columns),
            predicts_sampled=nothing.predicts_sampled.new_zeros(1, num_columns - 1),
            segments=(num_columns,),
            prefixes=(),
            num_sharing=1,
        )


def micro_batches(
    batch: Batch,
    plan: Sequence[Sequence[int]],
    remove_padding: bool,
    column_multiple: int = 1,
    prompts: Sequence[int] | None = None,
    segment_multiple: int = 1,
    with_tokens: bool = False,
    as_tree: bool = False,
) -> list[MicroBatch]:
    """Return the blocks that `plan` lists, of a batch with `input_ids`, `sampled` and columns of sampled tokens.

    A block is as wide as its content needs, rounded up to a multiple of `column_multiple`. prompts: `prompt_numbers` of
    the rows, where rows of a packed block share prompts. segment_multiple divides column_multiple; the length of every
    packed row is rounded up to a multiple of it. with_tokens: fill `MicroBatch.tokens`, with the batch's
    `routed_experts` where it has them. as_tree: lay packed rows as a trie, without prompts and segment_multiple.
    """
    # Flat from here on: indexing and slicing a batch costs more than a small block's pass.
    order = torch.tensor([row for rows in plan for row in rows])
    lengths, num_sampled, before = row_lengths(batch["input_ids"]), batch.num_sampled, first_true(batch["sampled"])
    num_parts, parts = conversations(batch)
    of_tokens, of_sampled = elements_of(order, lengths), elements_of(order, num_sampled)
    fields = {name: batch.flat(name)[of_sampled] for name in batch.names if name not in NO_FIELDS}
    lengths, num_sampled = lengths[order], num_sampled[order]
    counts = [len(rows) for rows in plan]
    sizes, field_sizes = ([int(part.sum()) for part in of.split(counts)] for of in (lengths, num_sampled))
    of_blocks = num_parts[order].split(counts)
    sequences = parts[elements_of(order, num_parts)].split([int(part.sum()) for part in of_blocks])
    per_token = (batch.flat(name)[of_tokens].split(sizes) for name in ("input_ids", "sampled"))
    per_row = (sequences, *(of.split(counts) for of in (num_sampled, before[order])))
    split_fields = {name: field.split(field_sizes) for name, field in fields.items()}
    blocks = []
    for number, (rows, tokens, sampled, long, drawn, first) in enumerate(zip(plan, *per_token, *per_row, strict=True)):
        mine = {name: field[number] for name, field in split_fields.items()}
        if as_tree:
            tree = prefix_tree(tokens, sampled, long, expert_bytes(batch, rows) if "routed_experts" in batch else None)
            input_ids, segments = laid_as_tree(tokens, tree, column_multiple)
            nothing = torch.zeros(1, input_ids.shape[1] - 1, dtype=torch.bool)
            blocks.append(MicroBatch(input_ids, nothing, drawn, torch.tensor(rows), mine, segments, tree=tree))
        elif remove_padding:
            left_out = None
            if prompts is not None:
                left_out = shared_prefixes([prompts[row] for row in rows], long.tolist(), first.tolist())
            content = packed(tokens, sampled, long, column_multiple, segment_multiple, left_out)
            input_ids, predicts, segments, prefixes = content
            blocks.append(MicroBatch(input_ids, predicts, drawn, torch.tensor(rows), mine, segments, prefixes))
        else:
            input_ids, predicts = padded(tokens, sampled, long, column_multiple)
            blocks.append(MicroBatch(input_ids, predicts, drawn, torch.tensor(rows), mine))
    if with_tokens:
        known = routed_tokens(batch, plan, sequences)
        blocks = [replace(block, tokens=tokens) for block, tokens in zip(blocks, known, strict=True)]
    return blocks


def laid_as_tree(tokens: Tensor, tree: PrefixTree, column_multiple: int) -> tuple[Tensor, tuple[int, ...]]:
    """(input_ids, segments) of a block, from its rows' tokens; what rounds it up is a segment of its own."""
    segments = filled_up(tree.segments, column_multiple)
    input_ids = tokens.new_zeros(1, sum(segments))
    input_ids[0, tree.columns] = tokens
    return input_ids, segments


def lengths_in_blocks(batch: Batch, segment_multiple: int) -> list[int]:
    """Return the columns that each row takes in a packed block, where every conversation is rounded up."""
    num_parts, parts = conversations(batch)
    rounded = -(-parts // segment_multiple) * segment_multiple
    ends, sums = num_parts.cumsum(0), torch.nn.functional.pad(rounded.cumsum(0), (1, 0))
    lengths: list[int] = (sums[ends] - sums[ends - num_parts]).tolist()
    return lengths


def padded(tokens: Tensor, sampled: Tensor, lengths: Tensor, column_multiple: int) -> tuple[Tensor, Tensor]:
    """(input_ids, predicts_sampled) of rows under each other, from their tokens end to end."""
    width = round_up(int(lengths.max()), column_multiple)
    input_ids, is_sampled = laid_out(tokens, sampled, lengths, torch.arange(len(lengths)) * width, len(lengths) * width)
    return input_ids.view(-1, width), is_sampled.view(-1, width)[:, 1:]


def laid_out(
    tokens: Tensor, sampled: Tensor, lengths: Tensor, starts: Tensor, num_columns: int
) -> tuple[Tensor, Tensor]:
    """Return tokens and their mask in that many columns, each row from its start on; filler is 0 and not sampled."""
    position = torch.arange(len(tokens)) + (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    input_ids, is_sampled = tokens.new_zeros(num_columns), torch.zeros(num_columns, dtype=torch.bool)
    input_ids[position], is_sampled[position] = tokens, sampled
    return input_ids, is_sampled


def packed(
    tokens: Tensor,
    sampled: Tensor,
    lengths: Tensor,
    column_multiple: int,
    segment_multiple: int = 1,
    prefixes: tuple[tuple[int, int], ...] | None = None,
) -> tuple[Tensor, Tensor, tuple[int, ...], tuple[tuple[int, int], ...]]:
    """(input_ids, predicts_sampled, segments, prefixes) of rows end to end.

    The filler of a row, up to segment_multiple, ends its segment; that of the block is a segment of its own.
    prefixes: from `shared_prefixes`, what is left out at the beginning of each row.
    """
    if prefixes is not None:
        left_out = torch.tensor([length for _, length in prefixes])
        column = places_in_rows(lengths)
        stays = column >= left_out.repeat_interleave(lengths)
        tokens, sampled, lengths = tokens[stays], sampled[stays], lengths - left_out
    room = -(-lengths // segment_multiple) * segment_multiple
    starts, segments = room.cumsum(0) - room, filled_up(room.tolist(), column_multiple)
    input_ids, is_sampled = laid_out(tokens, sampled, lengths, starts, sum(segments))
    return input_ids[None], is_sampled[None, 1:], segments, prefixes or ()


def shared_prefixes(
    prompts: Sequence[int], lengths: Sequence[int], num_prompt_tokens: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """For each of the rows end to end, (first column, columns) of the prompt that it shares with an earlier row.

    prompts: numbers of the rows' prompts. A prompt that an earlier row has is left out, but for its last token, which
    another token follows in every row.
    """
    first_column: dict[int, int] = {}
    prefixes, column = [], 0
    for prompt, length, before in zip(prompts, lengths, num_prompt_tokens, strict=True):
        shared = max(before - 1, 0) if prompt in first_column else 0
        prefixes.append((first_column.setdefault(prompt, column) if shared else 0, shared))
        first_column.setdefault(prompt, column)
        column += length - shared
    return tuple(prefixes)


def filled_up(segments: Sequence[int], column_multiple: int) -> tuple[int, ...]:
    """The lengths of segments, and of what fills their sum up to a multiple of `column_multiple`, if it is none."""
    filler = -sum(segments) % column_multiple
    return (*segments, filler) if filler else tuple(segments)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def in_one_shape(blocks: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The blocks, filled up on the right and below to the largest of them."""
    num_rows, num_columns = (max(block.input_ids.shape[dim] for block in blocks) for dim in (0, 1))
    return [widened(block, num_columns, num_rows) for block in blocks]


def widened(block: MicroBatch, num_columns: int, num_rows: int | None = None) -> MicroBatch:
    """The block, filled up on the right to that many columns, and below to that many rows; None: its own number.

    In a packed block the filler is a segment of its own.
    """
    rows, columns = block.input_ids.shape
    room = (0, num_columns - columns, 0, 0 if num_rows is None else num_rows - rows)
    if not any(room):
        return block
    segments = block.segments
    if segments is not None and room[1]:
        segments = (*segments, room[1])
    return replace(
        block,
        input_ids=torch.nn.functional.pad(block.input_ids, room),
        predicts_sampled=torch.nn.functional.pad(block.predicts_sampled, room),
        segments=segments,
    )


def in_row_order(values: Iterable[tuple[MicroBatch, Tensor]], lengths: Tensor, like: Tensor) -> Tensor:
    """(block, values [elements of its rows, ...]) -> all rows of a batch end to end, with zeros for unreported ones.

    lengths: int64, elements of every row of the batch. like: has the values' dtype and further dims.
    """
    whole = like.new_zeros(int(lengths.sum()), *like.shape[1:])
    for block, part in values:
        if block.is_reported:
            whole[elements_of(block.rows.cpu(), lengths)] = part
    return whole
