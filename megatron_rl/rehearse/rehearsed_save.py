"""A checkpoint's save in a rehearsal: all that ranks agree on, and no tensor's bytes. And objects that ranks exchange,
which are recorded as calls without sizes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import state_dict_utils
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint import default_planner

from megatron_rl.rehearse.dispatch_mode import RehearsalMode
from megatron_rl.roles.host import RankHost


def record_objects(mode: RehearsalMode) -> None:
    """Record the exchange of objects, which all ranks answer as this one does. Applied once, not undone.

    Nobody answers for the root of a scatter: what a rank that is not the root would get is its own request, None.
    """

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        mode.note_objects("all_gather_object", group)
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None, **of: Any) -> None:
        mode.note_objects("gather_object", of.get("group"), dst)
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def broadcast_object_list(object_list: list[Any], src: int | None = None, **of: Any) -> None:
        mode.note_objects("broadcast_object_list", of.get("group"), src)

    for function in (all_gather_object, gather_object, broadcast_object_list):
        for module in (dist, dist.distributed_c10d):
            vars(module)[function.__name__] = function


def rehearse_save(host: RankHost) -> None:
    """Save all trained roles of a rank, to a folder that is removed: files of tensors are planned and not written.

    Whether shards of all ranks make up the model is not checked: only this rank's are known.
    """
    vars(state_dict_utils)["validate_sharding_integrity"] = lambda *args, **options: None
    vars(default_planner)["_validate_global_plan"] = lambda plan, metadata: []
    for name, stand_in in (("preload_tensors", _left_there), ("write_preloaded_data_multiproc", _written)):
        setattr(FileSystemWriterAsync, name, staticmethod(stand_in))
    with tempfile.TemporaryDirectory(prefix="megatron_rl-rehearsal-") as folder:
        for role in host.trained:
            (Path(folder) / role).mkdir()
        host.begin_save(Path(folder))
        host.finish_save(wait=True)


def _left_there(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
    return write_buckets


def _written(transforms: list[Any], use_msc: bool, rank: int, write_buckets: list[Any], results: Any) -> None:
    results.put({number: [] for number in range(len(write_buckets))})
