"""What deltas cost, compared with whole weights: bytes, and seconds of two processes of one thread over gloo.

    python scripts/bench/deltas.py --megabytes 256

One process trains and one generates, so nothing is passed on. Each arm sends the same bfloat16 model; arms are
interleaved. Between two processes of one machine bytes cost little, and what is printed is mostly the cost of finding,
packing and writing changes: it is what a slow network must win back.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from transition_job import qwen2_model

from megatron_rl.hybrid_engine.allgather_pp import FlatParameters
from megatron_rl.hybrid_engine.layout import Slot
from megatron_rl.hybrid_engine.plan import Member, aligned
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.hybrid_engine.weight_transfer import WeightReceiver, WeightSender
from megatron_rl.parallel.sharding import Place, shard_of

SHARES = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
BUCKET_BYTES = 32 << 20
WHOLE = "whole"


def rank_main(rank: int, port: int, megabytes: int, rounds: int, path: str) -> None:
    """Time the transfers of one rank; the training rank writes a table to `path`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    tensors, place = qwen2_model(2 * megabytes), Place(0, 1, 1)
    slots, stop = [], 0
    for name, tensor in tensors.items():
        slots.append(Slot(name, 0, aligned(stop), shard_of(tensor, place)))
        stop = slots[-1].stop
    flat = torch.randn(stop, generator=torch.Generator().manual_seed(0)).bfloat16()
    ends: dict[bool, Any] = {}
    for deltas in (False, True):
        transport = Transport(dist.group.WORLD)
        options: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "verify_every": 0}
        if rank == 0:
            own = FlatParameters((flat,), Member(0, 0, 0, tuple(slots)))
            ends[deltas] = WeightSender(own, tensors, transport, deltas=deltas, **options)
            ends[deltas].send(0)
        else:
            ends[deltas] = WeightReceiver(place, tensors, torch.bfloat16, torch.device("cpu"), deltas=deltas, **options)
            ends[deltas].join(Member(0, 1, 0, wanted=place), transport)
            ends[deltas].receive()
    seconds: dict[str, list[tuple[float, float]]] = {}  # wall, and CPU of both processes
    sent: dict[str, float] = {}
    for number in range(rounds):
        for share in SHARES:
            generator = torch.Generator().manual_seed(number)
            if rank == 0:
                flat.view(torch.int16)[torch.rand(stop, generator=generator) < share] ^= 1
            for deltas, name in ((True, f"{share:.1%}"), (False, WHOLE)):
                dist.barrier()
                start, begun = time.perf_counter(), time.process_time()
                report = ends[deltas].send(number) if rank == 0 else ends[deltas].receive()
                used = torch.tensor(time.process_time() - begun, dtype=torch.float64)
                dist.all_reduce(used)
                seconds.setdefault(name, []).append((time.perf_counter() - start, float(used)))
                sent[name] = report.leaving_bytes / report.model_bytes
    if rank == 0:
        rows = [f"{'changed':>8} {'bytes / model':>14} {'ms':>6} {'CPU ms':>7}"]
        for name, times in seconds.items():
            wall, used = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
            rows.append(f"{name:>8} {sent[name]:14.4f} {wall:6.0f} {used:7.0f}")
        Path(path).write_text("\n".join(rows))
    dist.destroy_process_group()


def main(
    megabytes: Annotated[int, typer.Option(help="Size of the model in bfloat16.")] = 256,
    rounds: Annotated[int, typer.Option(help="Transfers of every arm.")] = 5,
) -> None:
    """Print a table."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "table")
        mp.spawn(rank_main, (port, megabytes, rounds, path), nprocs=2)
        print(Path(path).read_text())


if __name__ == "__main__":
    typer.run(main)
