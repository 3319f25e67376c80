"""Memory that leaves and comes back under a captured graph: map, capture, unmap, use it otherwise, map, replay."""

from __future__ import annotations

import os
import time
from typing import Any

import step_outcome
import torch

ROUNDS, FEW_ROUNDS = 50, 5


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """With segments of torch's allocator that grow, and without; seconds of release, `empty_cache` and mapping."""
    if device == "cpu":
        raise step_outcome.NotRun("graphs, and memory that is mapped, need a GPU")
    from megatron_rl.hybrid_engine.cuda_memory import allocator

    try:
        allocator()
    except (ImportError, RuntimeError) as error:
        raise step_outcome.NotRun(
            f"vLLM's allocator is not there ({error}); scripts/gpu_day/take_cumem.py takes it"
        ) from None
    for grows in (True, False):
        set_growing(grows)
        figures[f"expandable_segments:{grows}"] = rounds(torch.device(device), small)


def set_growing(grows: bool) -> None:
    """For this process, from now on; vLLM's allocator reads the variables."""
    text = f"expandable_segments:{grows}"
    os.environ |= {"PYTORCH_ALLOC_CONF": text, "PYTORCH_CUDA_ALLOC_CONF": text}
    torch.cuda.empty_cache()
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(text)


def rounds(where: torch.device, small: bool) -> dict[str, float]:
    """Raises AssertionError where a replayed graph reads anything but what has just been written."""
    from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer

    size = 1024 if small else 8192
    buffer = MemoryBuffer(4 * size * size, torch.bfloat16, where, "gpu_check")
    weight = buffer.view(size * size, (size, size))
    address, states = weight.data_ptr(), torch.randn(64, size, device=where).bfloat16()
    weight.normal_()
    states @ weight  # loads kernels before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = states @ weight
    seconds = {"release": 0.0, "empty_cache": 0.0, "map": 0.0}
    for number in range(FEW_ROUNDS if small else ROUNDS):
        free, _ = torch.cuda.mem_get_info(where)
        timed(seconds, "release", buffer.release)
        gained = torch.cuda.mem_get_info(where)[0] - free
        assert gained > 0.9 * buffer.num_bytes, f"round {number}: only {gained >> 20} MiB became free"
        other = torch.full((buffer.num_bytes // 4,), float(number), device=where)  # what takes the place meanwhile
        assert bool((other == number).all())
        del other
        timed(seconds, "empty_cache", torch.cuda.empty_cache)
        timed(seconds, "map", buffer.allocate)
        assert weight.data_ptr() == address
        weight.copy_(torch.randn(size, size, device=where).bfloat16())
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, states @ weight), f"round {number}: the graph read something else"
    return {f"{name}, seconds each": value / (number + 1) for name, value in seconds.items()}


def timed(seconds: dict[str, float], name: str, body: Any) -> None:
    """Add the seconds of a body."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    body()
    torch.cuda.synchronize()
    seconds[name] += time.perf_counter() - start


if __name__ == "__main__":
    step_outcome.main(run)
