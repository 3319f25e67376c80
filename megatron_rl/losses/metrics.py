"""Metrics of a loss, from the parts that micro-batches and ranks have to the numbers that a step reports.

Everything is joined by name. A part has no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

MetricParts = Mapping[str, "Tensor"]
"""Name -> what a micro-batch adds to a metric: a scalar, where the metric is the sum of its parts, or [2] (sum, count),
where it is the sum of all sums over the sum of all counts."""


def add_parts(parts: Sequence[MetricParts]) -> dict[str, Tensor]:
    """Add the parts of micro-batches. A micro-batch adds nothing to a metric that it does not have."""
    import torch

    shapes = {name: part for block in parts for name, part in block.items()}
    zeros = {name: torch.zeros_like(part) for name, part in shapes.items()}
    rows = [_flat(zeros | dict(block)) for block in parts]
    return _named(torch.stack(rows).sum(0), shapes)


def numbers_over_ranks(parts: MetricParts, group: dist.ProcessGroup) -> dict[str, float]:
    """Add the parts of all ranks and return each metric's number; a metric with a count of 0 is left out.

    All ranks of `group` must call, with the same names in the same order.
    """
    import torch.distributed as dist

    flat = _flat(parts)
    dist.all_reduce(flat, group=group)
    summed = {name: part.tolist() for name, part in _named(flat.cpu(), parts).items()}
    pairs = {name: part if isinstance(part, list) else (part, 1.0) for name, part in summed.items()}
    return {name: total / count for name, (total, count) in pairs.items() if count}


def _flat(parts: MetricParts) -> Tensor:
    import torch

    return torch.cat([part.reshape(-1) for part in parts.values()])


def _named(flat: Tensor, like: MetricParts) -> dict[str, Tensor]:
    cut = flat.split([part.numel() for part in like.values()])
    return {name: values.view_as(part) for (name, part), values in zip(like.items(), cut, strict=True)}
