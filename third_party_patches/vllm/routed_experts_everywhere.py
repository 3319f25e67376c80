"""Let every rank of a tensor-parallel group keep the routed experts that vLLM returns.

Reason: vLLM keeps them only on the first rank of a group, from which its one scheduler takes them. With an external
launcher each rank has its own scheduler, and those of the other ranks stop with "worker output is missing".
What it does: the connector that keeps them takes every rank for the first. All ranks see the same rows.
"""

from __future__ import annotations

from types import SimpleNamespace

from third_party_patches.guard import VLLM, Patch


def first_rank() -> SimpleNamespace:
    """Replace `get_tp_group`; the connector reads only this attribute."""
    return SimpleNamespace(is_first_rank=True)


def apply() -> None:
    """Replace what the connector's module calls; must run before an engine is built."""
    from vllm.distributed.aux_output_connector import worker

    worker.get_tp_group = first_rank


PATCH = Patch(
    VLLM, apply, drop_when="vLLM's connector for auxiliary outputs keeps them on every rank that has a scheduler"
)
