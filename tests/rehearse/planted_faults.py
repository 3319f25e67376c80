"""Faults as programs of two ranks, and what a rehearsal must say of each; run by test_planted_faults.py.

`python planted_faults.py LIBRARY RANK` prints one JSON object: name -> the report of this rank. A program is a function
under `@planted(words)`; words: "" where nothing may be said.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from third_party_patches.torch import fake_cuda

PLANTED = {}


def planted(*words):
    """Every one of the words must be said of the two ranks together."""

    def register(program):
        PLANTED[program.__name__] = program, words
        return program

    return register


def ones(torch, *shape, dtype=None):
    return torch.ones(*shape, dtype=dtype, device="cuda")


@planted()
def equal_calls(rank, torch, dist):
    work = dist.all_reduce(ones(torch, 4), async_op=True)
    work.wait()
    for each in dist.batch_isend_irecv([dist.P2POp((dist.isend, dist.irecv)[rank], ones(torch, 3), 1 - rank)]):
        each.wait()
    dist.all_gather_into_tensor(ones(torch, 8), ones(torch, 4))
    dist.barrier()


@planted("rank 0's allreduce of 4 float32", "waits for rank 1")
def collective_left_out(rank, torch, dist):
    if rank == 0:
        dist.all_reduce(ones(torch, 4))


@planted("rank 1's recv of 4 float32 on cuda", "meets rank 0's send of 4 bfloat16 on cuda")
def dtype_of_a_message(rank, torch, dist):
    if rank == 0:
        dist.send(ones(torch, 4, dtype=torch.bfloat16), 1)
    else:
        dist.recv(ones(torch, 4), 0)


@planted("meets rank 0's send of 4 bfloat16 on cuda", "AssertionError")
def dtype_of_a_message_before_an_error(rank, torch, dist):
    dtype_of_a_message(rank, torch, dist)
    if rank == 1:
        raise AssertionError("float32 takes another path")


@planted("one reduces by MAX, the other by SUM")
def another_reduction(rank, torch, dist):
    dist.all_reduce(ones(torch, 4), op=(dist.ReduceOp.MAX, dist.ReduceOp.SUM)[rank])


@planted("ranks 0, 1: allreduce of 6 float32", "is not contiguous, which NCCL refuses")
def strided_tensor(rank, torch, dist):
    dist.all_reduce(ones(torch, 2, 3).t())


@planted("ranks 0, 1: allreduce of 4 float32", "is never waited for")
def work_without_a_wait(rank, torch, dist):
    dist.all_reduce(ones(torch, 4), async_op=True)


@planted("allgather_base of 9 float32 on cuda and 4 float32 on cuda", "9 elements are not 2 times 4")
def gathered_size(rank, torch, dist):
    dist.group.WORLD._allgather_base(ones(torch, 9), ones(torch, 4)).wait()


@planted("has a type that NCCL does not move", "NCCL has no reduction BOR", "NCCL averages no int64")
def what_nccl_lacks(rank, torch, dist):
    dist.all_reduce(ones(torch, 4, dtype=torch.int16))
    dist.all_reduce(ones(torch, 4, dtype=torch.int64), op=dist.ReduceOp.BOR)
    dist.all_reduce(ones(torch, 4, dtype=torch.int64), op=dist.ReduceOp.AVG)


@planted("one is of rows, the other of columns")
def groups_of_two_purposes(rank, torch, dist):
    rows, columns = (dist.new_group([0, 1], group_desc=name) for name in ("rows", "columns"))
    for group in (rows, columns) if rank else (columns, rows):
        dist.all_reduce(ones(torch, 4), group=group)


@planted()
def streams_in_order(rank, torch, dist):
    """Events, works, waits of the host and record_stream, each where it belongs."""
    side, main, ready = torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        side.wait_stream(main)
        made = ones(torch, 8)
        ready.record()
    main.wait_event(ready)
    made.add_(1).record_stream(main)
    whole = ones(torch, 8)
    work = dist.all_reduce(whole[:4], async_op=True)
    whole[4:].add_(1)
    work.wait()
    whole.add_(1)
    host = torch.zeros(8).pin_memory()
    there = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    host.add_(1)
    back = there.to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert back.sum().item() == 0


@planted("the read at", "on the default stream takes 32 bytes of the write at", "on side stream")
def side_stream_without_an_event(rank, torch, dist):
    with torch.cuda.stream(torch.cuda.Stream()):
        made = ones(torch, 8)
    made.sum()


@planted("memory freed may be used again while the read at", "call record_stream")
def freed_without_record_stream(rank, torch, dist):
    side, made = torch.cuda.Stream(), ones(torch, 8)
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        made.sum()
    del made


@planted("takes 32 bytes of the write at", "on collectives of default_pg, and nothing orders them")
def use_before_the_work(rank, torch, dist):
    total = ones(torch, 8)
    work = dist.all_reduce(total, async_op=True)
    total.add_(1)
    work.wait()


@planted("on the host takes 32 bytes of the read at", "nothing orders them")
def host_buffer_changed_under_a_copy(rank, torch, dist):
    host = torch.zeros(8).pin_memory()
    host.to("cuda", non_blocking=True)
    host.add_(1)


@planted("the read at", "on the host takes 32 bytes of the write at")
def host_reads_a_copy_too_early(rank, torch, dist):
    ones(torch, 8).to("cpu", non_blocking=True).sum()


@planted("takes 32 bytes of a storage that has", "released at autograd: allocate them before")
def weights_released_before_use(rank, torch, dist):
    weights = ones(torch, 8)
    weights.untyped_storage().resize_(0)
    weights.view(2, 4).sum()


@planted("recv", "takes 32 bytes of a storage that has 0, released at")
def scratch_released_before_a_message(rank, torch, dist):
    scratch = ones(torch, 8)
    scratch.untyped_storage().resize_(0)
    (dist.send, dist.recv)[rank](scratch, 1 - rank)
    dist.send(ones(torch, 2), 1 - rank) if rank else dist.recv(ones(torch, 3), 1 - rank)


@planted("memory released at", "may be used again while the write at", "on collectives of default_pg")
def released_under_a_work(rank, torch, dist):
    total = ones(torch, 8)
    work = dist.all_reduce(total, async_op=True)
    total.untyped_storage().resize_(0)
    work.wait()


def report_of(program, rank, torch, dist):
    from megatron_rl.rehearse.dispatch_mode import RehearsalMode
    from megatron_rl.rehearse.memory_tracker import MemoryTracker

    mode = RehearsalMode(torch.device("cuda", 0), MemoryTracker())
    CURRENT[:] = [mode]
    fake_cuda.GPU.on_wait, fake_cuda.GPU.on_record_stream = mode.wait, mode.order.record
    failure = {}
    try:
        with mode:
            program(rank, torch, dist)
    except BaseException:
        failure = {"failure": traceback.format_exc()}
    return mode.report() | failure | {"number": rank}


CURRENT = []
"""The mode of the program that runs."""


def main(library, rank):
    fake_cuda.load(Path(library))
    import torch
    import torch.distributed as dist

    from megatron_rl.rehearse.child import follow_resizes
    from megatron_rl.rehearse.recorded_works import record_works
    from third_party_patches.torch import fake_parameters, fake_worlds

    for patch in (fake_cuda, fake_parameters, fake_worlds):
        patch.PATCH.apply()
    dist.init_process_group(rank=rank, world_size=2)
    record_works(lambda: CURRENT[0])
    follow_resizes(lambda storage: CURRENT[0].resized(storage))
    print(json.dumps({name: report_of(program, rank, torch, dist) for name, (program, _) in PLANTED.items()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
