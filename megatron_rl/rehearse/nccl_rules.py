"""NCCL's rules for the tensors of one call, which torch's fake groups do not check. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.rehearse.group_calls import RECEIVE, SEND, Size

TYPES = {
    *("int8", "uint8", "bool", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2"),
}
"""torch's names of the types that NCCL moves."""
REDUCTIONS = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"}
WHOLE_TYPES = {"int8", "uint8", "bool", "int32", "int64"}
GATHERS, SCATTERS = "allgather_base", "reduce_scatter_base"
UNEQUAL_TYPES = {SEND, RECEIVE, "barrier"}
"""Calls whose tensors need not have one type."""


def broken_rules(
    name: str, reduction: str, sizes: Sequence[Size], are_contiguous: Sequence[bool], num_ranks: int
) -> list[str]:
    """Return what NCCL would refuse of a call with these tensors; nothing of tensors on the CPU.

    name, reduction: as in `GroupCall`. are_contiguous: of each tensor. num_ranks: of the group.
    """
    on_device = [size for size in sizes if size.device == "cuda"]
    if not on_device:
        return []
    found = [
        f"{size} is not contiguous, which NCCL refuses; send .contiguous()"
        for size, is_contiguous in zip(sizes, are_contiguous, strict=True)
        if size.device == "cuda" and not is_contiguous
    ]
    found += [f"{size} has a type that NCCL does not move" for size in on_device if size.dtype not in TYPES]
    if len(on_device) < len(sizes):
        found.append("some of its tensors are on the CPU")
    if reduction and reduction not in REDUCTIONS:
        found.append(f"NCCL has no reduction {reduction}")
    if reduction == "AVG" and any(size.dtype in WHOLE_TYPES for size in on_device):
        found.append(f"NCCL averages no {on_device[0].dtype}")
    if name not in UNEQUAL_TYPES and len({size.dtype for size in on_device}) > 1:
        found.append("its tensors have different types")
    if name in (GATHERS, SCATTERS) and len(sizes) == 2:
        large, small = (sizes[0], sizes[1]) if name == GATHERS else (sizes[1], sizes[0])
        if large.numel != small.numel * num_ranks:
            found.append(f"{large.numel} elements are not {num_ranks} times {small.numel}")
    return found
