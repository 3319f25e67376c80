"""Sums over the rows of tokens packed end to end. Legend: B rows, T tokens of all rows, `lengths` int64 [B]."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def row_of_token(lengths: Tensor, num_tokens: int | None = None) -> Tensor:
    """int64 [T]: the row that each token belongs to. num_tokens: T; None: the host waits for it on a GPU."""
    import torch

    return torch.repeat_interleave(lengths, output_size=num_tokens)


def sum_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """values [T] -> their sum in each row [B]; 0 for an empty row. Differentiable."""
    return values.new_zeros(lengths.numel()).index_add(0, row_of_token(lengths, len(values)), values)


def total_rows(values: Tensor, lengths: Tensor, otherwise: Tensor) -> Tensor:
    """values [T] -> their sum in each row [B]; `otherwise` [B] for an empty row."""
    return sum_rows(values, lengths).where(lengths > 0, otherwise)


def mean_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """values [T] -> their mean in each row [B]; 0 for an empty row. Differentiable."""
    return sum_rows(values, lengths) / lengths.clamp(min=1)


def last_of_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """values [T] -> the last of each row [B]; rows must not be empty. Differentiable."""
    return values[lengths.cumsum(0) - 1]


def max_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """values [T] -> the largest of each row [B]; 0 for an empty row."""
    largest = values.new_zeros(lengths.numel())
    return largest.scatter_reduce(0, row_of_token(lengths, len(values)), values, "amax", include_self=False)


def mean_counted(values: Tensor, counts: Tensor, lengths: Tensor) -> Tensor:
    """values [T] -> their mean in each row [B] over the tokens where `counts` [T] is 1; 0 where there is none.

    Differentiable.
    """
    return sum_rows(values * counts, lengths) / sum_rows(counts, lengths).clamp(min=1)


def spread(values: Tensor, lengths: Tensor, num_tokens: int | None = None) -> Tensor:
    """values [B] -> [T]: the value of its row for each token. num_tokens: as for `row_of_token`."""
    return values.repeat_interleave(lengths, output_size=num_tokens)
