"""How fast and how lean is the way from training to rollout shards? Interleaved runs of several ways, on gloo ranks.

    python scripts/bench/transition.py [--json FILE] [--megabytes 256] [--rounds 7]

Prints, for each layout and arm: bytes received over the lower bound, median time and spread, speed of ours over the
arm, peak extra memory; and the time that each further tensor costs when the bytes stay the same.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from rich.console import Console
from rich.table import Table
from transition_arms import Arm, FullGather, Ours, OursVerified, PerTensor
from transition_job import Job, Layout, synthetic_model

from megatron_rl.config.schema import RolloutConfig

LAYOUTS = [Layout("TP2PP2->TP2", 4, 2, 2, 2), Layout("TP4->TP2", 4, 4, 1, 2)]
NUM_TENSORS = 48
SLOPE_TENSORS = (64, 256, 1024)
MIB = 1 << 20
BUCKET_BYTES = RolloutConfig().update_weights_bucket_megabytes * MIB


def make_arms(job: Job) -> dict[str, Arm]:
    from transition_megatron import CoreResharding

    return {
        "ours": Ours(job, BUCKET_BYTES),
        "ours, verified": OursVerified(job, BUCKET_BYTES),
        "full gather": FullGather(job),
        "per tensor": PerTensor(job, cached=False),
        "per tensor, cached": PerTensor(job, cached=True),
        "core.resharding": CoreResharding(job),
    }


def timed(arm: Arm) -> float:
    """Seconds of one run on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    arm.run()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def peak_extra_bytes(arm: Arm) -> int:
    """Growth of this process's resident set at its highest during one run."""
    arm.release()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = status_bytes("VmRSS")
    arm.run()
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(job: Job, rounds: int) -> dict[str, dict]:
    """Every arm: right shards first, then interleaved timings; numbers are those of the worst rank."""
    arms = make_arms(job)
    results: dict[str, dict] = {}
    for name, arm in arms.items():
        arm.run()
        if not job.is_right(arm.shards()):
            raise RuntimeError(f"rank {job.rank}: arm {name!r} leaves wrong rollout shards")
        numbers = torch.tensor([arm.received_bytes, peak_extra_bytes(arm)], dtype=torch.int64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        results[name] = {"received_bytes": int(numbers[0]), "peak_extra_bytes": int(numbers[1]), "seconds": []}
        arm.release()
    for _ in range(rounds):
        for name, arm in arms.items():
            results[name]["seconds"].append(timed(arm))
            arm.release()
    ours = arms["ours"]
    limits = torch.tensor([ours.lower_bound_bytes, ours.need_bytes], dtype=torch.int64)
    dist.all_reduce(limits, dist.ReduceOp.MAX)
    return {"lower_bound_bytes": int(limits[0]), "need_plus_bucket_bytes": int(limits[1]), "arms": results}


def rank_main(rank: int, port: int, megabytes: int, slope_megabytes: int, rounds: int, only: str, path: str) -> None:
    # Large pages for every arm, as in the workers: taking memory anew costs less.
    os.environ |= {"THP_MEM_ALLOC_ENABLE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=LAYOUTS[0].world_size)
    report: dict = {}
    for layout in (layout for layout in LAYOUTS if only in layout.name):
        report[layout.name] = measure(Job(layout, synthetic_model(NUM_TENSORS, megabytes * MIB)), rounds)
        slopes = (
            {}
            if slope_megabytes == 0
            else {
                count: measure(Job(layout, synthetic_model(count, slope_megabytes * MIB)), rounds)["arms"]
                for count in SLOPE_TENSORS
            }
        )
        report[layout.name]["us_per_tensor"] = {
            arm: slope({count: statistics.median(runs[arm]["seconds"]) for count, runs in slopes.items()}) * 1e6
            for arm in slopes[SLOPE_TENSORS[0]]
        }
    if rank == 0:
        Path(path).write_text(json.dumps(report, indent=2))
    dist.barrier()
    dist.destroy_process_group()


def slope(points: dict[int, float]) -> float:
    """Least-squares slope."""
    return statistics.linear_regression(list(points), list(points.values())).slope


def print_report(report: dict) -> None:
    for layout, measured in report.items():
        table = Table(title=f"{layout}: lower bound {measured['lower_bound_bytes'] / MIB:.1f} MiB per rank")
        for column in (
            "arm",
            "received / bound",
            "median ms",
            "min - max",
            "arm / ours",
            "peak extra MiB",
            "us/tensor",
        ):
            table.add_column(column, justify="left" if column == "arm" else "right")
        ours = statistics.median(measured["arms"]["ours"]["seconds"])
        for name, arm in measured["arms"].items():
            median = statistics.median(arm["seconds"])
            table.add_row(
                name,
                f"{arm['received_bytes'] / measured['lower_bound_bytes']:.2f}",
                f"{median * 1e3:.1f}",
                f"{min(arm['seconds']) * 1e3:.1f} - {max(arm['seconds']) * 1e3:.1f}",
                f"{median / ours:.2f}",
                f"{arm['peak_extra_bytes'] / MIB:.1f}",
                f"{measured['us_per_tensor'][name]:.1f}",
            )
        Console(width=110).print(table)
        Console().print(f"need plus one bucket: {measured['need_plus_bucket_bytes'] / MIB:.1f} MiB\n")


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where to write every number.")] = Path(
        "outputs/bench/transition.json"
    ),
    megabytes: Annotated[int, typer.Option(help="Size of the model, MiB of float32.")] = 256,
    slope_megabytes: Annotated[int, typer.Option(help="Size at which the number of tensors is varied.")] = 32,
    rounds: Annotated[int, typer.Option(help="Interleaved runs of every arm.")] = 7,
    only: Annotated[str, typer.Option(help="Layouts whose name holds this.")] = "",
) -> None:
    """Run the benchmark on four processes of this machine."""
    json_file.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (port, megabytes, slope_megabytes, rounds, only, str(json_file))
    mp.spawn(rank_main, args=arguments, nprocs=LAYOUTS[0].world_size)
    print_report(json.loads(json_file.read_text()))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    typer.run(main)
