"""Let one process be any rank of a world whose other ranks do not exist.

Reason: a rehearsal makes a rank's process groups without NCCL and without peers. torch has a backend for that, `fake`,
but callers name nccl and gloo, and wait for objects that nobody sends.
What it does: every group is one of the backend `fake`; a broadcast of objects leaves this rank's own. For a process of
its own that rehearses: nothing is undone.
"""

from __future__ import annotations

from typing import Any

from third_party_patches.guard import TORCH, Patch


def apply() -> None:
    """Replace how groups are made in `torch.distributed`."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start, new_group = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, rank: int = -1, world_size: int = -1, **options: Any) -> None:
        start("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def fake_group(*args: Any, **options: Any) -> Any:
        return new_group(*args, **options | {"backend": "fake", "pg_options": None})

    for module in (dist, dist.distributed_c10d):
        vars(module)["init_process_group"] = init_process_group
        vars(module)["new_group"] = fake_group
        vars(module)["broadcast_object_list"] = lambda *args, **options: None


PATCH = Patch(TORCH, apply, drop_when="torch.distributed takes a backend for all groups of a process from one setting")
