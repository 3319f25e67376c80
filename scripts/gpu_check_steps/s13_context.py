"""What a process takes of a GPU that no tensor has: CUDA's context, kernels, communicators of NCCL, a graph."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import step_outcome
import torch
import torch.distributed as dist


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """MiB of each, by what the driver says is free; what torch has reserved is left out."""
    if device == "cpu":
        raise step_outcome.NotRun("a CPU has no context")
    from megatron_rl.node_check.node_facts import node_facts

    listed = node_facts(on_gpus=True).gpus
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    if len(listed) == 1:
        figures["context, MiB"] = round((listed[0].free_bytes - free) / 2**20, 1)
    figures["total, MiB"] = round(total / 2**20, 1)
    taken = Taken(figures)
    factor = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16)
    taken.note("products", lambda: factor @ factor)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    taken.note("first communicator", lambda: dist.all_reduce(factor))
    for number in range(3):
        group = dist.new_group([0])
        taken.note(f"communicator {number + 2}", lambda group=group: dist.all_reduce(factor, group=group))
    taken.note("a captured graph", lambda: captured(factor))
    dist.destroy_process_group()


def captured(factor: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of one product."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        factor @ factor
    graph.replay()
    return graph


class Taken:
    """Notes what becomes taken outside of torch's allocator."""

    def __init__(self, figures: dict[str, Any]) -> None:
        self._figures, self._before, self._kept = figures, self._now(), []

    def note(self, name: str, body: Any) -> None:
        """Run the body, keep what it returns, and note the MiB."""
        self._kept.append(body())
        torch.cuda.synchronize()
        now = self._now()
        self._figures[f"{name}, MiB"] = round((now - self._before) / 2**20, 1)
        self._before = now

    @staticmethod
    def _now() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


if __name__ == "__main__":
    step_outcome.main(run)
