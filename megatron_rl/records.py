"""Typed records that roles and the controller exchange, with their shapes.

Legend: B rows (samples), P prompt tokens, L tokens of a row, of which N are sampled.
`[B, (L)]` is a ragged tensor: `torch.nested` in jagged layout, one row per sample, nothing padded.
Prompts are a `Batch` whose rows have no response. Columns of Python values stay on the controller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from megatron_rl.columns import COLUMNS, PROMPT_COLUMNS
from megatron_rl.images import pieces_between
from megatron_rl.remote_columns import ColumnPiece, RemoteColumn

Stored = torch.Tensor | RemoteColumn
"""A column: dense, ragged, or ragged and held where ranks made it."""
AnyColumn = Stored | list[Any]
"""A column of tensors, or of a Python value for each row, which no rank is sent."""


def ragged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack B one-dimensional tensors (any lengths, same dtype) into one ragged `[B, (N)]` tensor without padding."""
    if not rows:
        raise ValueError("ragged() needs at least one row; slice an existing record to get an empty one")
    values = torch.cat(list(rows))
    lengths = torch.tensor([row.numel() for row in rows])
    return ragged_from_lengths(values, lengths)


def ragged_from_lengths(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """View flat `values [sum(lengths)]` as a ragged `[B, (N)]` tensor; `lengths [B]` int64."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def row_lengths(batch: Stored) -> torch.Tensor:
    """Lengths `[B]` (int64) of the rows of a ragged tensor."""
    nested: Any = batch  # torch types no jagged layout
    lengths: torch.Tensor = nested.offsets().diff()
    return lengths


def ragged_of_pieces(rows: Sequence[Sequence[ColumnPiece]]) -> Stored:
    """Pack B rows of pieces, of which there is at least one, into one ragged column, held if one piece is."""
    column = RemoteColumn.of_pieces(rows)
    is_here = all(isinstance(part, torch.Tensor) for part in column.parts)
    return ragged_from_lengths(column.values(), column.lengths) if is_here else column


Conversation = str | list[dict[str, Any]]
"""A prompt in the form of its file: text, or messages with role and content."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: temperature 0 is greedy; `max_tokens` counts the end token.

    salt: a part of every request's seed that differs between batches. with_experts: return the experts of each token
    too, from an engine that can. stop_token_ids: tokens that end a response; None: the model's end tokens.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    salt: int
    with_experts: bool = False
    stop_token_ids: tuple[int, ...] | None = None


class Batch:
    """B rows with columns by name, which `columns.COLUMNS` declares: their shapes and dtypes, who makes and reads them.

    A row is a trajectory: its tokens, and where the policy sampled them. Columns of sampled tokens have an element for
    each True of `sampled`, in the row's order. Column arguments that are None are left out.
    """

    def __init__(self, **columns: AnyColumn | None) -> None:
        """Raises ValueError as `add`."""
        self._columns: dict[str, Any] = {}
        self._num_sampled: torch.Tensor | None = None
        self.add(**columns)

    def add(self, columns: Batch | None = None, /, **named: AnyColumn | None) -> None:
        """Add columns, or replace them. Raises ValueError for a column that is not declared or does not fit."""
        added = {name: column for name, column in named.items() if column is not None}
        new = added if columns is None else columns._columns | added
        self._columns |= new
        if "sampled" in new:
            self._num_sampled = None
        num_sampled = self.num_sampled if "sampled" in self else None
        for name in added:
            column, shape = self._columns[name], COLUMNS[name].shape
            if len(column) != len(self):
                raise ValueError(f"column {name} has {len(column)} rows, the batch {len(self)}")
            if name == "sampled" and ((first_true(self[name]) == 0) & (self.num_sampled > 0)).any():
                raise ValueError("the first token of a row cannot be sampled: nothing comes before it")
            if name == "conversation_starts" and (column.values() & self.flat("sampled")).any():
                raise ValueError("the first token of a conversation cannot be sampled: nothing comes before it")
            if shape == "sampled token" and num_sampled is not None and (row_lengths(column) != num_sampled).any():
                raise ValueError(
                    f"column {name} must have an element for each sampled token, {num_sampled.tolist()} in its rows; "
                    f"it has {row_lengths(column).tolist()}"
                )

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self._columns.values())))

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    @overload
    def __getitem__(self, key: str) -> torch.Tensor: ...

    @overload
    def __getitem__(self, key: torch.Tensor | slice) -> Batch: ...

    def __getitem__(self, key: str | torch.Tensor | slice) -> torch.Tensor | Batch:
        """Return a column by its name, or a batch of some rows, which shares no memory.

        Raises ValueError for a column that does not exist.
        """
        if isinstance(key, str):
            if key not in self:
                raise ValueError(f"column {key} is needed before it was made, by: {COLUMNS[key].maker}")
            column: Any = self._columns[key]
            return ragged_from_lengths(column.values(), column.lengths) if isinstance(column, RemoteColumn) else column
        rows = torch.arange(len(self))[key]
        return self._like({name: rows_of_any(column, rows) for name, column in self._columns.items()})

    def get(self, name: str) -> torch.Tensor | None:
        """Return a column, or None if it does not exist."""
        return self[name] if name in self._columns else None

    def stored(self, name: str) -> Stored:
        """Return a column as it is here: one that its ranks hold is not read. Raises ValueError if it does not
        exist."""
        column: Stored = self._columns[name] if name in self else self[name]
        return column

    def objects(self, name: str) -> list[Any]:
        """Return a column of Python values, one for each row. Raises ValueError if it does not exist."""
        column: Any = self[name]
        return list(column)

    def flat(self, name: str) -> torch.Tensor:
        """Return the elements of a ragged column end to end. Raises ValueError for a column that does not exist."""
        return self.stored(name).values()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns that exist."""
        return tuple(self._columns)

    @property
    def num_sampled(self) -> torch.Tensor:
        """int64 [B]: sampled tokens of each row."""
        if self._num_sampled is None:
            self._num_sampled = counts_in_rows(self["sampled"])
        return self._num_sampled

    @property
    def sampled_ids(self) -> torch.Tensor:
        """Ragged int64 [B, (N)]: the sampled tokens of each row, turn after turn."""
        return self.per_sampled_token(self.flat("input_ids")[self.flat("sampled")])

    def per_sampled_token(self, values: torch.Tensor) -> torch.Tensor:
        """View values [N, ...] of the sampled tokens of all rows, end to end, as a column."""
        return ragged_from_lengths(values, self.num_sampled)

    def select(self, *names: str) -> Batch:
        """Return a batch of those of the named columns that exist."""
        return self._like({name: column for name, column in self._columns.items() if name in names})

    def without(self, *names: str) -> Batch:
        """Return a batch of all other columns."""
        return self._like({name: column for name, column in self._columns.items() if name not in names})

    def read_by(self, *readers: str) -> Batch:
        """Return a batch of the columns that these readers declare, such as `columns.ACTOR_UPDATE`."""
        return self.select(*COLUMNS.read_by(*readers))

    def neutral(self) -> Batch:
        """Return a copy that fills up a split and adds nothing to a loss: no token is sampled, or `weights` are 0.

        Experts that are not its own are left out.
        """
        if "image_patches" in self:
            return self[:]
        if "weights" in self:
            return self._like(self._columns | {"weights": torch.zeros_like(self["weights"])})
        nothing = torch.zeros(len(self), dtype=torch.int64)
        columns = self.without("routed_experts")._columns
        for name, column in columns.items():
            if COLUMNS[name].shape == "sampled token":
                columns[name] = ragged_from_lengths(none_of(column), nothing)
        mask = self["sampled"]
        columns["sampled"] = ragged_from_lengths(torch.zeros_like(mask.values()), row_lengths(mask))
        return self._like(columns)

    @staticmethod
    def joined(batches: Sequence[Batch]) -> Batch:
        """Return the rows of several batches of the same columns, one after the other.

        Where some have `conversation_starts`, the rows of the others are one conversation each; where some have
        `routed_experts`, those of the others are not known.
        """
        if any("conversation_starts" in batch for batch in batches):
            batches = [batch._with_starts() for batch in batches]
        routed = next((batch._columns["routed_experts"] for batch in batches if "routed_experts" in batch), None)
        if routed is not None:
            batches = [batch._with_experts_like(none_of(routed)) for batch in batches]
        columns = {name: [batch._columns[name] for batch in batches] for name in batches[0].names}
        return Batch._like({name: joined_of_any(parts) for name, parts in columns.items()})

    def _with_starts(self) -> Batch:
        mask = self["sampled"]
        none = ragged_from_lengths(torch.zeros_like(mask.values()), row_lengths(mask))
        return self._like({"conversation_starts": none, **self._columns})

    def _with_experts_like(self, nothing: torch.Tensor) -> Batch:
        unknown = ragged_from_lengths(nothing, torch.zeros(len(self), dtype=torch.int64))
        return self._like({"routed_experts": unknown, **self._columns})

    @staticmethod
    def _like(columns: dict[str, Any]) -> Batch:
        batch = Batch()
        batch._columns = columns
        return batch


def rows_of(column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows with these numbers (int64) of a ragged or dense column."""
    if not column.is_nested:
        return column[rows]
    lengths = row_lengths(column)
    return ragged_from_lengths(column.values()[elements_of(rows, lengths)], lengths[rows])


def joined_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of several ragged or dense columns, one after the other."""
    if not parts[0].is_nested:
        return torch.cat(list(parts))
    return ragged_from_lengths(torch.cat([part.values() for part in parts]), torch.cat([*map(row_lengths, parts)]))


def rows_of_any(column: AnyColumn, rows: torch.Tensor) -> AnyColumn:
    """Return `rows_of` a column, which stays held if it is."""
    if isinstance(column, list):
        return [column[row] for row in rows.tolist()]
    return column.rows(rows) if isinstance(column, RemoteColumn) else rows_of(column, rows)


def joined_of_any(parts: Sequence[Any]) -> AnyColumn:
    """Return `joined_columns`, which are held if one of them is."""
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) == len(parts):
        return joined_columns(tensors)
    return RemoteColumn.joined([as_held(part) for part in parts])


def as_held(column: Stored) -> RemoteColumn:
    """Return a ragged column as rows that can be joined with those of held columns; a tensor is its own part."""
    return column if isinstance(column, RemoteColumn) else RemoteColumn.of(column.values(), row_lengths(column))


def none_of(column: Stored) -> torch.Tensor:
    """Return no element of a ragged column [0, *element]."""
    if isinstance(column, RemoteColumn):
        return torch.empty(0, *column.element, dtype=column.dtype)
    return column.values()[:0]


def elements_of(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int64: the places of the elements of `rows`, row after row, among rows of `lengths` that lie end to end."""
    taken = lengths[rows]
    shift = (lengths.cumsum(0) - lengths)[rows] - (taken.cumsum(0) - taken)
    return torch.arange(int(taken.sum())) + shift.repeat_interleave(taken)


def places_in_rows(lengths: torch.Tensor) -> torch.Tensor:
    """int64 [sum(lengths)]: the place of every element in its row, from 0, where rows of `lengths` lie end to end."""
    return torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def counts_in_rows(mask: torch.Tensor) -> torch.Tensor:
    """int64 [B]: how many elements of each row of a ragged bool tensor are True."""
    lengths = row_lengths(mask)
    counted = torch.zeros(len(mask.values()) + 1, dtype=torch.int64)
    torch.cumsum(mask.values(), 0, out=counted[1:])
    ends = lengths.cumsum(0)
    return counted[ends] - counted[ends - lengths]


def conversations(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 [B]: conversations of each row, int64 [C]: tokens of each conversation, row after row).

    A token is read with those before it in its conversation; a row without `conversation_starts` is one conversation.
    """
    lengths, anew = row_lengths(batch["input_ids"]), batch.get("conversation_starts")
    if anew is None:
        return torch.ones_like(lengths), lengths
    starts = anew.values().clone()
    starts[lengths.cumsum(0) - lengths] = True
    places = torch.cat([starts.nonzero().flatten(), lengths.sum()[None]])
    return counts_in_rows(ragged_from_lengths(starts, lengths)), places.diff()


def first_true(mask: torch.Tensor) -> torch.Tensor:
    """int64 [B]: place of the first True in each row of a ragged bool tensor; a row without one gives its length."""
    lengths, is_true = row_lengths(mask), mask.values()
    place = places_in_rows(lengths)
    rows = torch.repeat_interleave(lengths)
    return lengths.scatter_reduce(0, rows[is_true], place[is_true], "amin")


def image_bytes(batch: Batch, rows: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 [T, 16]: the digest of its image for every placeholder in these rows (int64; None: all rows), else 0.

    Two tokens with different bytes are different tokens, whatever their ids.
    """
    lengths, pieces = row_lengths(batch["input_ids"]), batch["image_pieces"]
    if rows is not None:
        lengths, pieces = lengths[rows], rows_of(pieces, rows)
    first, num, low, high = pieces.values().T
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(row_lengths(pieces))
    digests = torch.zeros(int(lengths.sum()), 2, dtype=torch.int64)
    places = (starts + first).repeat_interleave(num) + places_in_rows(num)
    digests[places] = torch.stack([low, high], 1).repeat_interleave(num, 0)
    return digests.view(torch.uint8)


def prompt_numbers(batch: Batch, experts: torch.Tensor | None = None) -> list[int]:
    """Number the prompts of the rows: rows with the same tokens before the first sampled one, and the same images in
    them, have the same number.

    experts: ragged [B, (T), layers, K], to which the tokens will be sent; prompts with other experts are other prompts.
    Experts of a prompt's last token, which rows do not share, do not matter.
    """
    tokens, lengths = batch.flat("input_ids").numpy(), row_lengths(batch["input_ids"])
    starts, num_prompt_tokens = lengths.cumsum(0) - lengths, first_true(batch["sampled"])
    sent = [b""] * len(lengths)
    if experts is not None:
        counts = (num_prompt_tokens - 1).clamp(min=0).tolist()
        sent = [part[:count].numpy().tobytes() for part, count in zip(experts.unbind(), counts, strict=True)]
    if "image_pieces" in batch:
        shown = ragged_from_lengths(image_bytes(batch), lengths).unbind()
        counts = num_prompt_tokens.tolist()
        sent = [row + part[:count].numpy().tobytes() for row, part, count in zip(sent, shown, counts, strict=True)]
    numbers: dict[tuple[bytes, bytes], int] = {}
    return [
        numbers.setdefault((tokens[start : start + length].tobytes(), row), len(numbers))
        for start, length, row in zip(starts.tolist(), num_prompt_tokens.tolist(), sent, strict=True)
    ]


def single_turn(input_ids: torch.Tensor, num_sampled: torch.Tensor, **columns: torch.Tensor | None) -> Batch:
    """Return rows whose last `num_sampled` (int64 [B]) tokens are sampled. input_ids: ragged int64 [B, (L)]."""
    lengths = row_lengths(input_ids)
    place = places_in_rows(lengths)
    sampled = place >= (lengths - num_sampled).repeat_interleave(lengths)
    return Batch(input_ids=input_ids, sampled=ragged_from_lengths(sampled, lengths), **columns)


def prompts_of(rows: Batch) -> Batch:
    """Return the prompts of rows: what stands before their first sampled token, and the columns of prompts."""
    prompts = rows.select("input_ids", *PROMPT_COLUMNS)
    if "sampled" in rows:
        lengths, num_read = row_lengths(rows["input_ids"]), first_true(rows["sampled"])
        is_read = places_in_rows(lengths) < num_read.repeat_interleave(lengths)
        prompts.add(input_ids=ragged_from_lengths(rows.flat("input_ids")[is_read], num_read))
        if "images" in rows:
            shown = zip(rows.objects("images"), num_read.tolist(), strict=True)
            prompts.add(images=[pieces_between(pieces, 0, stop) for pieces, stop in shown])
    return prompts


def repeated(prompts: Batch, num_samples: int) -> Batch:
    """Return each prompt `num_samples` times; samples of one row are adjacent, and `sample` counts a prompt's from 0.

    If a prompt is in the batch twice (at the border of two epochs), `sample` continues counting, so that no two
    samples share a seed. Every row here makes one group, so such a prompt has two: `uid` is the row's number.
    """
    rows = torch.arange(len(prompts)).repeat_interleave(num_samples)
    samples = prompts[rows]
    num_samples_of: Counter[int] = Counter()
    numbers = []
    for index in samples["index"].tolist():
        numbers.append(num_samples_of[index])
        num_samples_of[index] += 1
    samples.add(uid=rows, sample=torch.tensor(numbers, dtype=torch.int64))
    return samples


def one_per_group(rows: Batch) -> Batch:
    """Return the first row of each group of `uid`, in the order of `uid`."""
    _, group = rows["uid"].unique(return_inverse=True)
    first = torch.full((int(group.max()) + 1,), len(rows))
    return rows[first.scatter_reduce(0, group, torch.arange(len(rows)), "amin")]


def answer_rows(batch: Batch) -> Batch:
    """Return the responses of a batch of answers as one row each, prompt after prompt, with the columns of images."""
    lengths = batch.flat("answer_lengths")
    rows = Batch(**{name: ragged_from_lengths(batch.flat(name), lengths) for name in ("input_ids", "sampled")})
    if "image_pieces" in batch:
        counts = batch.flat("answer_images")
        rows.add(**{name: ragged_from_lengths(batch.flat(name), counts) for name in ("image_pieces", "image_grids")})
        features = batch.stored("image_features")
        if isinstance(features, RemoteColumn):  # an image is a piece of it
            rows.add(image_features=features.regrouped(counts))
        else:
            answer, num_tokens = torch.repeat_interleave(counts), batch.flat("image_pieces")[:, 1]
            sizes = torch.zeros_like(counts).index_add_(0, answer, num_tokens)
            rows.add(image_features=ragged_from_lengths(features.values(), sizes))
    return rows


def num_answers(batch: Batch) -> torch.Tensor:
    """int64 [G]: responses of each row of a batch of responses."""
    return row_lengths(batch["answer_lengths"])


@dataclass(frozen=True)
class RoleState:
    """The state of a trained role in a checkpoint next to its tensors; equal on all ranks.

    num_updates: number of optimizer steps, the position in the learning-rate schedule. adam_step: the step of Adam's
    bias correction. loss_scale: factor of the loss in float16, a power of two; 0: it is not scaled. good_steps: number
    of updates since the scale last changed.
    """

    num_updates: int
    adam_step: int
    loss_scale: int = 0
    good_steps: int = 0
