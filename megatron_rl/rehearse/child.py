"""The rehearsing process: `python -m megatron_rl.rehearse.child REQUEST`. One fork for each rank.

The fake device comes before torch; what all ranks need is imported once, before the first fork.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.cluster.channel import Channel, ready
from megatron_rl.cluster.child_processes import ForkedChild, die_with
from megatron_rl.errors import ConfigError
from megatron_rl.observe.appended_file import replace_file
from megatron_rl.rehearse.rehearsal_request import RankOfPool, RehearsalRequest, rank_file
from third_party_patches.torch import fake_cuda


def main(request_file: str) -> None:
    """Rehearse all ranks of a request. Each writes its file, with `failure` if it failed."""
    request = RehearsalRequest.read(Path(request_file))
    die_with(os.getppid())
    fake_cuda.load(Path(request.library))
    _import_all()
    waiting, running = list(request.ranks), dict[int, ForkedChild]()
    while waiting or running:
        while waiting and len(running) < request.jobs:
            sys.stdout.flush()
            child = ForkedChild.start(partial(_report, request, waiting.pop(0)))
            running[child.pidfd] = child
        for ended in ready([], running):
            running.pop(ended).end()


def _report(request: RehearsalRequest, rank: RankOfPool, parent: Channel) -> None:
    """Rehearse a rank, in a process of its own, and write its file."""
    try:
        report = rehearsed(request, rank)
    except BaseException as error:
        report = {"failure": failure_of(error)}
    content = {"number": rank.number, "pool": rank.pool, "rank": rank.rank} | report
    replace_file(rank_file(Path(request.out), rank.number), json.dumps(content).encode())


def failure_of(error: BaseException) -> str:
    """Return an error's traceback; the message alone of errors that a user can mend."""
    if isinstance(error, ConfigError):
        return f"ConfigError: {error}"
    return "".join(traceback.format_exception(error))


def _import_all() -> None:
    """Import what every rank needs, and what torch imports at its first fake operations."""
    import torch
    import torch._inductor.utils
    import torch.nested._internal.nested_tensor
    from torch._subclasses.fake_tensor import FakeTensorMode

    import megatron_rl.rehearse.fake_peers
    import megatron_rl.rehearse.rehearsed_rank
    import megatron_rl.roles.preloaded  # noqa: F401

    fake_cuda.apply()
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.empty(4, 4, device="cuda:0").mm(torch.empty(4, 4, device="cuda:0")).bernoulli()


def rehearsed(request: RehearsalRequest, rank: RankOfPool) -> dict[str, Any]:
    """Return the report of one rank, in a process of its own; of a failed one the calls before, and `failure`."""
    import torch

    from megatron_rl.config.load import read_run
    from megatron_rl.config.roles import Placement
    from megatron_rl.planning.checked_config import planned_task
    from megatron_rl.rehearse.dispatch_mode import RehearsalMode
    from megatron_rl.rehearse.fake_peers import replace_peers
    from megatron_rl.rehearse.memory_tracker import MemoryTracker
    from megatron_rl.rehearse.recorded_works import record_works
    from megatron_rl.rehearse.rehearsed_rank import RehearsedRank
    from megatron_rl.rehearse.rehearsed_transfer import JointRanks, first_node

    config = read_run(Path(request.config), request.overrides, request.task).config
    assert config is not None  # the parent has checked it
    config = planned_task(config, request.task)
    placement = Placement.of(config)
    size, joint = placement.pools[rank.pool].size, JointRanks.of(config)
    environment = _environment(rank, size.world_size, size.num_ranks_per_node, first_node(placement, rank.pool))
    gpu = fake_cuda.GPU
    mode = RehearsalMode(torch.device("cuda", 0), MemoryTracker(gpu.allocate), rank.number - rank.rank)
    gpu.on_wait = mode.wait
    gpu.on_record_stream = mode.order.record
    follow_resizes(mode.resized)
    replace_peers(mode, _members(config, rank), joint)
    record_works(lambda: mode)
    try:
        with mode:
            rehearsal = RehearsedRank(config, rank.pool, environment, mode, joint)
            rehearsal.run()
    except BaseException as error:  # the calls before may be the cause
        return mode.report() | {"failure": failure_of(error)}
    return rehearsal.report() | mode.report()


def _members(config: Any, rank: RankOfPool) -> list[Any]:
    """Return the members of the exchange group of a rank whose pool trains and generates, as they hold each of its
    models, base and adapters; none of others.
    """
    from megatron_rl.planning.run_models import RunModels

    models = RunModels(config)
    shares = models.placement.is_colocated and models.training.spec.name == rank.pool
    held = [models.laid_actor_weights, *([models.actor_adapters] if models.actor_adapters else [])]
    return [models.members_with(rank.rank, weights) for weights in held] if shares else []


def follow_resizes(note: Callable[[Any], None]) -> None:
    """Call `note` with every storage whose size was changed in place, which no operation shows."""
    import torch

    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        answer = resize(storage, size)
        note(storage)
        return answer

    setattr(torch.UntypedStorage, "resize_", resize_)  # noqa: B010  mypy: it is a method


def _environment(rank: RankOfPool, world_size: int, ranks_per_node: int, first_node: int) -> Any:
    """Return a rank's place. The launcher shows a rank its own GPU alone. first_node: of its pool."""
    from megatron_rl.roles.environment import RankEnvironment

    node = first_node + rank.rank // ranks_per_node
    return RankEnvironment(rank.rank, world_size, 0, node, "127.0.0.1", "127.0.0.1", 0)


if __name__ == "__main__":
    main(sys.argv[1])
