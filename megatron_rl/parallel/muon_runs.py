"""Which parameters Muon updates, and which run of each a data-parallel rank has: arithmetic, no torch."""

from __future__ import annotations

from megatron_rl.parallel.sharding import Interval, LogicalTensor

OF_LAYERS = ".layers."


def is_muon_matrix(name: str, tensor: LogicalTensor) -> bool:
    """Whether Muon updates a parameter: matrices of layers, routers with them, as in Megatron; experts' one by one."""
    return OF_LAYERS in f".{name}" and len(tensor.segments[0].shape) == 2 + tensor.is_expert


def runs_in_bucket(start: int, stop: int, numel: int, size: int) -> tuple[Interval, ...]:
    """Return the run of a parameter's elements on each of `size` ranks that have equal parts of a bucket.

    start, stop: the parameter in the bucket. numel: elements of the bucket. A rank without any has an
    empty run.
    """
    share = numel // size
    runs = []
    for rank in range(size):
        low, high = max(start, rank * share), min(stop, (rank + 1) * share)
        runs.append((low - start, high - start) if low < high else (0, 0))
    return tuple(runs)
