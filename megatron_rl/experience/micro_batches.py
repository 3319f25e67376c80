"""Cut a mini-batch into micro-batches, called blocks: the rows of one pass through the model, and where they lie in it.

    batch of rows --MicroBatching.plan--> rows of each block --micro_batches--> one MicroBatch per block

1. Which rows share a block: a fixed number of them (`ppo_micro_batch_size_per_gpu`), or as many as their tokens allow
   (`use_dynamic_bsz`).
2. How they lie in it: packed end to end (`use_remove_padding`), padded to the longest, or as a tree of common prefixes
   (`prefix_tree.py`). In a packed block, rows with the same prompt may share one copy of it.

A row is a prompt with its response, or a whole episode. Its sampled tokens are those that the policy sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_rl.experience.block_layout import BlockLayout, shared_prefixes
from megatron_rl.experience.image_positions import BlockImages, BlockPatches, ImageMarks
from megatron_rl.experience.prefix_tree import PrefixTree, other_bytes, prefix_tree
from megatron_rl.experience.recorded_experts import RoutedTokens, routed_tokens
from megatron_rl.parallel.balance import SequenceWork, pack, together
from megatron_rl.parallel.zigzag import ContextShare
from megatron_rl.records import Batch, Stored, conversations, elements_of, first_true, row_lengths, rows_of

IMAGES = ("image_pieces", "image_grids", "image_features", "policy_features", "image_patches")
NO_FIELDS = ("input_ids", "sampled", "conversation_starts", "routed_experts", *IMAGES)
"""Columns that do not have a value for each sampled token."""


@dataclass(frozen=True)
class MicroBatching:
    """How the rows of one role are grouped into blocks, and how they lie there.

    num_rows: rows of a block, in the order of the batch, where max_tokens is None. max_tokens: most tokens of a block:
    as few blocks as possible, of equal `work`. remove_padding: pack rows end to end. as_tree: use the prefix-tree
    layout, and group rows by the tree's nodes that they share.
    """

    num_rows: int
    max_tokens: int | None = None
    remove_padding: bool = True
    as_tree: bool = False
    work: SequenceWork = SequenceWork(attention_parity=float("inf"))

    @property
    def is_dynamic(self) -> bool:
        """Whether the lengths of rows decide how many a block has."""
        return self.max_tokens is not None

    def plan(
        self, lengths: Sequence[int], num_blocks: int = 1, multiple: int = 1, prompts: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Return the rows of each block; every row is in one. lengths: tokens of each row.

        The other arguments count only where blocks are filled by tokens. num_blocks: least number of blocks. multiple:
        a divisor of their number. Rows set a limit to both: no block is empty. prompts: the number of each row's
        prompt: rows of one prompt stay in one block as far as that takes no more blocks.
        """
        row_by_row = self._fill([[row] for row in range(len(lengths))], lengths, num_blocks, multiple)
        if self.max_tokens is None or prompts is None:
            return row_by_row
        rows_together = max(Counter(prompts).values())
        while rows_together > 1:
            units = together(prompts, lengths, rows_together, self.max_tokens)
            if len(units) >= max(num_blocks, multiple):
                blocks = self._fill(units, lengths, num_blocks, multiple)
                if len(blocks) <= len(row_by_row):
                    return [sorted(rows) for rows in blocks]
            rows_together //= 2
        return row_by_row

    def plan_units(
        self, lengths: Sequence[int], sizes: Sequence[int], num_blocks: int = 1, multiple: int = 1
    ) -> list[list[int]]:
        """Return the rows of each block, as `plan`, where neighbouring rows stay in one block: the first `sizes[0]`
        rows, the next `sizes[1]`, and so on.

        `num_rows` counts these units instead of rows. Raises ValueError for a unit of more than `max_tokens`.
        """
        ends = accumulate(sizes)
        units = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return self._fill(units, lengths, num_blocks, multiple)

    def _fill(
        self, units: Sequence[Sequence[int]], lengths: Sequence[int], num_blocks: int, multiple: int
    ) -> list[list[int]]:
        """Return the rows of each block. units: rows that stay in one block."""
        if self.max_tokens is None:
            numbers = range(len(units))
            blocks = [list(numbers[first : first + self.num_rows]) for first in numbers[:: self.num_rows]]
        else:
            work_of_row = self.work(lengths)
            tokens = [sum(lengths[row] for row in rows) for rows in units]
            work = [sum(work_of_row[row] for row in rows) for rows in units]
            blocks = pack(tokens, work, self.max_tokens, num_blocks, multiple)
        return [[row for unit in block for row in units[unit]] for block in blocks]


@dataclass
class MicroBatch:
    """One block: the rows of one pass through the model.

    Legend: n rows with N sampled tokens, in b x S positions. A flat position is one of 0 to b * S - 1. A row with
    several conversations is several sequences, one after the other. With `tree` there are M pairs (a position, and a
    sampled token that follows it) in place of the N tokens: rows that share both have one pair.
    """

    input_ids: Tensor
    """int64 [b, S]. Padded: one sequence per line, aligned left, filled up with 0. Packed: b = 1, sequences end to end,
    then filler."""
    predicts_sampled: Tensor
    """bool [b, S - 1] on the CPU: whether the *next* token is a sampled one, of the same row. Unused with `tree`."""
    num_sampled: Tensor
    """int64 [n]: sampled tokens of each row."""
    rows: Tensor
    """int64 [n]: the number of each row in the batch."""
    fields: dict[str, Tensor]
    """The batch's columns with a value for each sampled token, such as `old_log_probs`: row after row, [N, ...]."""
    segments: tuple[int, ...] | None = None
    """Lengths of the packed sequences, filler included; they add up to S. None when padded."""
    prefixes: tuple[tuple[int, int], ...] = ()
    """Per packed sequence that shares its prompt: (first position, length) of that prompt without its last token,
    elsewhere in the micro-batch; length 0 where a sequence has its whole prompt."""
    share: ContextShare | None = None
    """The positions that this rank reads under context parallelism; None: all of them."""
    tokens: RoutedTokens | None = None
    """Router choices of the rows' tokens, where experts are replayed or recorded."""
    num_sharing: int | None = None
    """Number of context-parallel ranks that share the block; None: all of them do."""
    is_reported: bool = True
    """Whether this rank reports the results: one of the ranks that share the block does."""
    predict_index: Tensor | None = None
    """int64 [N], with `tree` [M]: flat position whose hidden state predicts each sampled token. None until the block is
    on the device; `predicting` computes it before."""
    tree: PrefixTree | None = None
    """Prefix-tree layout of the rows, with its own `segments`. `targets` and `scored` then have M pairs instead of N
    tokens; `whole` and `part` convert between them."""
    images: BlockImages | None = None
    """The images of the rows; None: they have none."""

    @property
    def targets(self) -> Tensor:
        """The sampled tokens, row after row: int64 [N], with `tree` [M]; with `share` only those that its positions
        predict.
        """
        targets = self.input_ids.flatten()[self.predicting() + 1] if self.tree is None else self.tree.targets
        return targets if self.share is None else targets[self.share.numbers]

    def scored(self, output: Tensor) -> Tensor:
        """Return a model's output where it predicts a sampled token, in the order of `targets`.

        output: [b, S, ...], with `share` [b, its positions, ...]. Returns [N, ...], with `tree` [M, ...].
        """
        return output.flatten(0, 1).index_select(0, self.predicting() if self.share is None else self.share.places)

    def prev_index(self) -> Tensor:
        """Return int64 [b * S] on the CPU: the flat position of the previous token of the same sequence, -1 for its
        first token. For all positions, also where `share` has a part. Not with `tree`.
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
        """Return `predict_index`, computed here if the block is not on the device yet."""
        if self.predict_index is not None:
            return self.predict_index
        if self.tree is not None:
            return self.tree.places
        return torch.nn.functional.pad(self.predicts_sampled, (0, 1)).flatten().nonzero()[:, 0]

    def whole(self, values: Tensor) -> Tensor:
        """Return values of all sampled tokens, [N, ...], from those of the tokens in `targets`.

        All context-parallel ranks must call, and get the same.
        """
        of_all_ranks = values if self.share is None else self.share.whole(values)
        return of_all_ranks if self.tree is None else self.tree.whole(of_all_ranks)

    def part(self, values: Tensor) -> Tensor:
        """Return the values of the tokens in `targets`, from those of all sampled tokens, [N, ...]."""
        of_targets = values if self.tree is None else self.tree.part(values)
        return of_targets if self.share is None else of_targets[self.share.numbers]

    def wide(self, name: str) -> Tensor:
        """Return a column of several numbers for each token, [N, ...], on the device, where those of all blocks may not
        fit.
        """
        return self.fields[name].to(self.input_ids.device)

    @property
    def kept(self) -> Tensor:
        """float32 [N]: 1 for each sampled token that counts in a loss, else 0; without the column all count."""
        if "kept" in self.fields:
            return self.fields["kept"]
        num_tokens = len(self.predicting() if self.tree is None else self.tree.pair_of_token)
        return torch.ones(num_tokens, device=self.input_ids.device)

    def tensors(self) -> dict[str, Tensor]:
        """Return what must be on the device when a pass begins, by name: everything but `wide` columns."""
        named = {"input_ids": self.input_ids, "num_sampled": self.num_sampled, "rows": self.rows}
        of_share = {} if self.share is None else {f"share.{name}": x for name, x in self.share.tensors().items()}
        of_tree = {} if self.tree is None else {f"tree.{name}": x for name, x in self.tree.tensors().items()}
        fields = {f"fields.{name}": field for name, field in self.fields.items() if field.dim() == 1}
        return named | {"predict_index": self.predicting()} | of_share | of_tree | fields

    def with_tensors(self, moved: Mapping[str, Tensor]) -> MicroBatch:
        """Return the block with these tensors in place of those of `tensors`: `moved` has them on the device."""
        changed: dict[str, Any] = {name: moved[name] for name in ("input_ids", "num_sampled", "rows", "predict_index")}
        if self.share is not None:
            of_share: dict[str, Any] = {name: moved[f"share.{name}"] for name in self.share.tensors()}
            changed["share"] = replace(self.share, **of_share)
        if self.tree is not None:
            changed["tree"] = self.tree.with_tensors({name: moved[f"tree.{name}"] for name in self.tree.tensors()})
        fields = {name: moved.get(f"fields.{name}", field) for name, field in self.fields.items()}
        return replace(self, **changed, fields=fields)

    def neutral(self) -> MicroBatch:
        """Return a block of the same shape without a row: it runs like this one and adds nothing to a loss."""
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
            images=None,
        )

    def idle(self, num_columns: int) -> MicroBatch:
        """Return a neutral block of one packed segment of `num_columns` positions, for this rank alone."""
        nothing = self.neutral()
        return replace(
            nothing,
            input_ids=nothing.input_ids.new_zeros(1, num_columns),
            predicts_sampled=nothing.predicts_sampled.new_zeros(1, num_columns - 1),
            segments=(num_columns,),
            prefixes=(),
            num_sharing=1,
        )


@dataclass(frozen=True)
class FlatRows:
    """Rows of a batch end to end, as plain tensors: taking rows of a `Batch` costs more than the pass of a small block.

    Legend: n rows with T tokens, N sampled ones, in C conversations. tokens: int64 [T]. sampled: bool [T], whether the
    policy sampled the token. num_sampled: int64 [n]. num_prompt: int64 [n], tokens before the first sampled one.
    conversations: int64 [C], tokens of each. fields: columns with a value for each sampled token, [N, ...].
    """

    tokens: Tensor
    sampled: Tensor
    num_sampled: Tensor
    num_prompt: Tensor
    conversations: Tensor
    fields: dict[str, Tensor]

    @classmethod
    def of_blocks(cls, batch: Batch, plan: Sequence[Sequence[int]]) -> list[FlatRows]:
        """Return the rows of each block. plan: their numbers."""
        rows, num_rows = torch.tensor([row for rows in plan for row in rows]), [len(rows) for rows in plan]
        lengths, num_sampled = row_lengths(batch["input_ids"]), batch.num_sampled
        num_conversations, conversation_lengths = conversations(batch)

        def split(counts: Tensor, *columns: Tensor) -> list[tuple[Tensor, ...]]:
            """Cut columns into blocks. counts: int64, elements of each row of the batch."""
            elements, sizes = elements_of(rows, counts), [int(part.sum()) for part in counts[rows].split(num_rows)]
            return [column[elements].split(sizes) for column in columns]

        tokens, sampled = split(lengths, batch.flat("input_ids"), batch.flat("sampled"))
        num_prompt = first_true(batch["sampled"])[rows].split(num_rows)
        (sequences,) = split(num_conversations, conversation_lengths)
        names = [name for name in batch.names if name not in NO_FIELDS]
        fields = dict(zip(names, split(num_sampled, *map(batch.flat, names)), strict=True))
        columns = zip(tokens, sampled, num_sampled[rows].split(num_rows), num_prompt, sequences, strict=True)
        return [cls(*block, {name: parts[i] for name, parts in fields.items()}) for i, block in enumerate(columns)]


def micro_batches(
    batch: Batch,
    plan: Sequence[Sequence[int]],
    remove_padding: bool,
    column_multiple: int = 1,
    prompts: Sequence[int] | None = None,
    segment_multiple: int = 1,
    with_tokens: bool = False,
    as_tree: bool = False,
    marks: ImageMarks | None = None,
    with_features: bool = True,
) -> list[MicroBatch]:
    """Return the blocks of a batch with `input_ids`, `sampled` and columns of sampled tokens. plan: rows of each block.

    A block has as many columns as its content needs, rounded up to a multiple of `column_multiple`. The layout is that
    of `as_tree` (a prefix tree), else of `remove_padding` (packed), else padded. Packed only: `prompts` has the number
    of each row's prompt, so that rows of a block share prompts; every sequence is rounded up to a multiple of
    `segment_multiple`, a divisor of column_multiple. with_tokens: fill `MicroBatch.tokens`, with the batch's
    `routed_experts` if it has any. marks: of image tokens, where the model reads images; with_features: fill
    `BlockImages.features`, too.
    """
    blocks, parts = [], FlatRows.of_blocks(batch, plan)
    for rows, flat in zip(plan, parts, strict=True):
        sequences = (flat.tokens, flat.sampled, flat.conversations)
        prefixes, tree = None, None
        if as_tree:
            tree = prefix_tree(*sequences, other_bytes(batch, rows))
        elif remove_padding and prompts is not None:
            own_prompts = [prompts[row] for row in rows]
            prefixes = shared_prefixes(own_prompts, flat.conversations.tolist(), flat.num_prompt.tolist())
        layout = BlockLayout(*sequences[1:], remove_padding, column_multiple, segment_multiple, prefixes, tree)
        input_ids, predicts, segments = layout.laid(flat.tokens)
        images = None
        if marks is not None and "image_grids" in batch:
            grids = rows_of(batch["image_grids"], torch.tensor(rows)).values()
            features = features_of_rows(batch, torch.tensor(rows), grids) if with_features else None
            images = BlockImages.laid(flat.tokens, grids, features, marks, layout)
        content = (flat.num_sampled, torch.tensor(rows), flat.fields)
        blocks.append(MicroBatch(input_ids, predicts, *content, segments, prefixes or (), tree=tree, images=images))
    if with_tokens:
        known = routed_tokens(batch, plan, [flat.conversations for flat in parts])
        blocks = [replace(block, tokens=tokens) for block, tokens in zip(blocks, known, strict=True)]
    return blocks


def features_of_rows(batch: Batch, rows: Tensor, grids: Tensor) -> Stored | BlockPatches:
    """Return the features of the images of these rows, or their patches where a tower is trained on them.

    grids: int64 [I, 3], of the images.
    """
    if "image_patches" in batch:
        digests = rows_of(batch["image_pieces"], rows).values()[:, 2:]
        return BlockPatches(grids, digests, batch.select("image_patches")[rows].stored("image_patches"))
    name = "policy_features" if "policy_features" in batch else "image_features"
    return batch.select(name)[rows].stored(name)


def lengths_in_blocks(batch: Batch, segment_multiple: int) -> list[int]:
    """Return the positions that each row takes in a packed block, where its conversations are rounded up."""
    num_conversations, conversation_lengths = conversations(batch)
    rounded = -(-conversation_lengths // segment_multiple) * segment_multiple
    ends, sums = num_conversations.cumsum(0), torch.nn.functional.pad(rounded.cumsum(0), (1, 0))
    lengths: list[int] = (sums[ends] - sums[ends - num_conversations]).tolist()
    return lengths


def in_one_shape(blocks: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return the blocks with filler on the right and below, so that all are as large as the largest one."""
    num_rows, num_columns = (max(block.input_ids.shape[dim] for block in blocks) for dim in (0, 1))
    return [widened(block, num_columns, num_rows) for block in blocks]


def widened(block: MicroBatch, num_columns: int, num_rows: int | None = None) -> MicroBatch:
    """Return the block with filler on the right up to that many columns, and below up to that many lines of positions
    (None: as many as it has). In a packed block the filler is a segment of its own.
    """
    lines, columns = block.input_ids.shape
    right, below = num_columns - columns, 0 if num_rows is None else num_rows - lines
    if not (right or below):
        return block
    segments = block.segments
    if segments is not None and right:
        segments = (*segments, right)
    return replace(
        block,
        input_ids=torch.nn.functional.pad(block.input_ids, (0, right, 0, below)),
        predicts_sampled=torch.nn.functional.pad(block.predicts_sampled, (0, right, 0, below)),
        segments=segments,
        images=None if block.images is None else block.images.widened(right, below),
    )


def in_row_order(values: Iterable[tuple[MicroBatch, Tensor]], lengths: Tensor, like: Tensor) -> Tensor:
    """Return the values of all rows of a batch, end to end in the order of the batch.

    values: (block, [elements of its rows, ...]). lengths: int64 [rows of the batch], elements of each. like: a tensor
    with the values' dtype and further dims. Rows of blocks that this rank does not report are 0.
    """
    in_order = like.new_zeros(int(lengths.sum()), *like.shape[1:])
    for block, of_block in values:
        if block.is_reported:
            in_order[elements_of(block.rows.cpu(), lengths)] = of_block
    return in_order
