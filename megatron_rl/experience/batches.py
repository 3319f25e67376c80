"""Cut experience into mini-batches (one optimizer step each) and those into dense micro-batches (one pass each)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.records import row_lengths, to_padded


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


def num_optimizer_steps(num_steps: int, batch_size: int, mini_batch_size: int, num_epochs: int) -> int:
    """Optimizer steps of a run: what `mini_batch_rows` yields per training step, times the training steps."""
    return num_steps * num_epochs * -(-batch_size // mini_batch_size)


@dataclass
class MicroBatch:
    """A dense block of rows for one pass through the model. Legend: b rows, S columns, N response tokens.

    input_ids: int64 [b, S], left-aligned, padded on the right with 0.
    predicts_response: bool [b, S - 1], true where the *next* token belongs to the response.
    fields: the record's ragged float fields, flattened row by row to [N].
    num_real_rows: rows before the padding that fills the block.
    """

    input_ids: Tensor
    predicts_response: Tensor
    fields: dict[str, Tensor]
    num_real_rows: int

    @property
    def targets(self) -> Tensor:
        """int64 [N]: the response tokens, row by row."""
        return self.input_ids[:, 1:][self.predicts_response]

    @property
    def response_lengths(self) -> Tensor:
        """int64 [b]: response tokens of each row; 0 for padding."""
        return self.predicts_response.sum(1)

    @property
    def kept(self) -> Tensor:
        """float32 [N]: 1 for each response token that counts in a loss; all of them where the record does not say."""
        default = self.predicts_response.new_ones(int(self.predicts_response.sum()), dtype=torch.float32)
        return self.fields.get("kept", default)

    def to(self, device: torch.device) -> MicroBatch:
        """The same block on another device."""
        fields = {name: field.to(device) for name, field in self.fields.items()}
        return MicroBatch(self.input_ids.to(device), self.predicts_response.to(device), fields, self.num_real_rows)

    def neutral(self) -> MicroBatch:
        """A block of the same shape without any real row: it runs like this one and adds nothing to a loss."""
        fields = {name: field[:0] for name, field in self.fields.items()}
        return MicroBatch(self.input_ids * 0, torch.zeros_like(self.predicts_response), fields, num_real_rows=0)


def micro_batches(record, micro_batch_size: int, column_multiple: int = 1) -> list[MicroBatch]:
    """Cut a record with `input_ids`, `response_lengths` and ragged float fields into blocks of equal shape.

    All blocks are `[micro_batch_size, longest row]`, as pipeline stages exchange tensors of one shape; the last one is
    filled up with rows that have no response. Never more rows than the record has when it fits in one block.
    `column_multiple`: the number of columns is rounded up to a multiple of it.
    """
    size = min(micro_batch_size, len(record))
    lengths, response_lengths = row_lengths(record.input_ids), record.response_lengths
    width = -(-int(lengths.max()) // column_multiple) * column_multiple
    dense = to_padded(record.input_ids, width)
    column = torch.arange(width - 1)[None]
    predicts = (column >= (lengths - response_lengths - 1)[:, None]) & (column < (lengths - 1)[:, None])
    names = [name for name in record.to_dict(retain_none=False) if name not in ("input_ids", "response_lengths")]
    ragged_fields = {name: record.get(name).values() for name in names}
    ends = [0, *response_lengths.cumsum(0).tolist()]

    blocks = []
    for start in range(0, len(record), size):
        stop = min(start + size, len(record))
        filler = size - (stop - start)
        blocks.append(
            MicroBatch(
                input_ids=torch.cat([dense[start:stop], dense.new_zeros(filler, width)]),
                predicts_response=torch.cat([predicts[start:stop], predicts.new_zeros(filler, width - 1)]),
                fields={name: flat[ends[start] : ends[stop]] for name, flat in ragged_fields.items()},
                num_real_rows=stop - start,
            )
        )
    return blocks
