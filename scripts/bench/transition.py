"""How fast and how lean is the way from training to rollout shards? Interleaved runs of several ways, on gloo ranks.

Four layouts generate on the ranks that train, two of them with whole experts, and one on others ("split").

    python scripts/bench/transition.py [--json FILE] [--megabytes 256] [--rounds 7]

Prints, for each layout and arm: bytes received over the lower bound, median time and spread, speed of ours over the
arm, peak extra memory, bytes out of training over the model's where pools are split; and the time that each further
tensor costs when the bytes stay the same.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from resident import give_back, peak_growth
from rich.console import Console
from rich.table import Table
from transition_arms import Arm, FullGather, Ours, OursVerified, PerTensor
from transition_job import Job, Layout, ModelJob, qwen2_model, qwen3_moe_model, synthetic_model
from transition_split import (
    GatherThenBroadcast,
    PerTensorBroadcast,
    ShardToShard,
    SplitJob,
    SplitLayout,
    SplitOurs,
)

from megatron_rl.config.rollout_keys import RolloutConfig
from megatron_rl.parallel.sharding import LogicalTensor

LAYOUTS = [
    Layout("TP2PP2->TP2", 4, 2, 2, 2),
    Layout("TP4->TP2", 4, 4, 1, 2),
    Layout("experts TP2PP2->TP2EP2", 4, 2, 2, 2, rollout_ep_size=2),
    Layout("experts TP2PP2EP2->TP2EP2", 4, 2, 2, 2, ep_size=2, rollout_ep_size=2),
    SplitLayout("split TP2PP2->2xTP2", 4, 2, 2, 2, num_replicas=2),
]
SLOPE_TENSORS = (64, 256, 1024)
MIB = 1 << 20
BUCKET_BYTES = RolloutConfig().update_weights_bucket_megabytes * MIB


def make_job(layout: Layout, tensors: dict[str, LogicalTensor]) -> ModelJob:
    return SplitJob(layout, tensors) if isinstance(layout, SplitLayout) else Job(layout, tensors)


def make_arms(job: ModelJob) -> dict[str, Arm]:
    if isinstance(job, SplitJob):
        return {
            "ours": SplitOurs(job, BUCKET_BYTES),
            "ours, verified": SplitOurs(job, BUCKET_BYTES, verify_every=1),
            "gather, then broadcast": GatherThenBroadcast(job, BUCKET_BYTES),
            "per tensor broadcast": PerTensorBroadcast(job, BUCKET_BYTES),
            "shard to shard, stacked whole": ShardToShard(job, BUCKET_BYTES),
        }
    assert isinstance(job, Job)
    arms: dict[str, Arm] = {
        "ours": Ours(job, BUCKET_BYTES),
        "ours, verified": OursVerified(job, BUCKET_BYTES),
        "full gather": FullGather(job),
        "per tensor": PerTensor(job, cached=False),
        "per tensor, cached": PerTensor(job, cached=True),
    }
    if not any(tensor.is_expert for tensor in job.tensors.values()):
        from transition_megatron import CoreResharding

        arms["core.resharding"] = CoreResharding(job)
    return arms


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
    release(arm)
    return peak_growth(arm.run)


def release(arm: Arm) -> None:
    """Give an arm's memory back to the system, so that all pay alike for taking it."""
    arm.release()
    give_back()


def sent_bytes(arm: Any) -> int:
    """What left the training pool in the last run."""
    total = torch.tensor(arm.sent_bytes, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total)


def measure(job: ModelJob, rounds: int) -> dict[str, Any]:
    """Every arm: right shards first, then interleaved timings; numbers are those of the worst rank."""
    arms = make_arms(job)
    results: dict[str, Any] = {}
    for name, arm in arms.items():
        arm.run()
        if not job.is_right(arm.shards()):
            raise RuntimeError(f"rank {job.rank}: arm {name!r} leaves wrong rollout shards")
        received = 0 if job.wanted is None else arm.received_bytes
        numbers = torch.tensor([received, peak_extra_bytes(arm)], dtype=torch.int64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        results[name] = {"received_bytes": int(numbers[0]), "peak_extra_bytes": int(numbers[1]), "seconds": []}
        if isinstance(job, SplitJob):
            results[name]["sent_over_model"] = sent_bytes(arm) / sum(
                4 * tensor.numel for tensor in job.tensors.values()
            )
        release(arm)
    order = list(arms)
    for number in range(rounds):
        # In a new order each time, so that what one arm leaves to the next evens out.
        for name in random.Random(number).sample(order, len(order)):
            results[name]["seconds"].append(timed(arms[name]))
            release(arms[name])
    ours: Any = arms["ours"]
    limits = torch.tensor([ours.lower_bound_bytes, ours.need_bytes], dtype=torch.int64)
    dist.all_reduce(limits, dist.ReduceOp.MAX)
    return {"lower_bound_bytes": int(limits[0]), "need_plus_bucket_bytes": int(limits[1]), "arms": results}


def rank_main(rank: int, port: int, size: int, megabytes: int, slope_megabytes: int, rounds: int, path: str) -> None:
    """Measure the chosen layouts of `size` ranks, and add them to the report in the file `path`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    report: dict = json.loads(Path(path).read_text())
    for layout in LAYOUTS:
        if layout.num_ranks == size and layout.name in report:
            has_experts = layout.rollout_ep_size > 1
            model = qwen3_moe_model(megabytes) if has_experts else qwen2_model(megabytes)
            measured = measure(make_job(layout, model), rounds)
            if slope_megabytes and not has_experts:
                measured["us_per_tensor"] = slopes(layout, slope_megabytes * MIB, rounds)
            report[layout.name] = measured
    dist.barrier()
    if rank == 0:
        Path(path).write_text(json.dumps(report, indent=2))
    dist.destroy_process_group()


def slopes(layout: Layout, num_bytes: int, rounds: int) -> dict[str, float]:
    """For each arm the microseconds that one more tensor costs when all of them together stay as large."""
    runs = {
        count: measure(make_job(layout, synthetic_model(count, num_bytes)), rounds)["arms"] for count in SLOPE_TENSORS
    }
    medians = {
        arm: [statistics.median(runs[count][arm]["seconds"]) for count in SLOPE_TENSORS]
        for arm in runs[SLOPE_TENSORS[0]]
    }
    return {arm: statistics.linear_regression(SLOPE_TENSORS, points).slope * 1e6 for arm, points in medians.items()}


def print_report(report: dict) -> None:
    for layout, measured in report.items():
        table = Table(title=f"{layout}: lower bound {measured['lower_bound_bytes'] / MIB:.1f} MiB per rank")
        is_split = any("sent_over_model" in arm for arm in measured["arms"].values())
        for column in (
            "arm",
            "received / bound",
            *(["out of training / M"] if is_split else []),
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
                *([f"{arm['sent_over_model']:.2f}"] if is_split else []),
                f"{median * 1e3:.1f}",
                f"{min(arm['seconds']) * 1e3:.1f} - {max(arm['seconds']) * 1e3:.1f}",
                f"{median / ours:.2f}",
                f"{arm['peak_extra_bytes'] / MIB:.1f}",
                f"{measured['us_per_tensor'][name]:.1f}" if "us_per_tensor" in measured else "-",
            )
        Console(width=130).print(table)
        Console().print(f"need plus one bucket: {measured['need_plus_bucket_bytes'] / MIB:.1f} MiB\n")


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where to write every number.")] = Path(
        "outputs/bench/transition.json"
    ),
    megabytes: Annotated[int, typer.Option(help="Size of the model, MiB of float32.")] = 256,
    slope_megabytes: Annotated[
        int, typer.Option(help="Size at which the number of tensors is varied; 0: it is not.")
    ] = 32,
    rounds: Annotated[int, typer.Option(help="Interleaved runs of every arm.")] = 7,
    only: Annotated[str, typer.Option(help="Layouts whose name holds this.")] = "",
) -> None:
    """Run the benchmark on processes of this machine."""
    json_file.parent.mkdir(parents=True, exist_ok=True)
    chosen = [layout for layout in LAYOUTS if only in layout.name]
    json_file.write_text(json.dumps({layout.name: {} for layout in chosen}))
    for size in dict.fromkeys(layout.num_ranks for layout in chosen):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(rank_main, args=(port, size, megabytes, slope_megabytes, rounds, str(json_file)), nprocs=size)
    print_report(json.loads(json_file.read_text()))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    typer.run(main)
