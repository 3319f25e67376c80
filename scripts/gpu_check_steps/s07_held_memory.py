"""With a fifth of the GPU held: vLLM's own demand for free memory fails, ours is met."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import step_outcome
import torch


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """vLLM's `request_memory` with what the GPU really has; on a CPU with figures made up."""
    try:
        from vllm.v1.worker.utils import request_memory
    except ModuleNotFoundError as error:
        raise step_outcome.NotRun(f"vLLM is not installed: {error}") from None
    from megatron_rl.rollout.arguments import LEAST_UTILIZATION

    held = None
    if device == "cuda":
        from vllm.utils.mem_utils import MemorySnapshot

        total = torch.cuda.get_device_properties(0).total_memory
        held = torch.empty(total // 5, dtype=torch.uint8, device="cuda")
        snapshot: Any = MemorySnapshot(device=torch.device("cuda", 0))
    else:
        snapshot = SimpleNamespace(total_memory=140 << 30, free_memory=112 << 30, device_="cpu")
    figures["GiB"] = {"total": snapshot.total_memory / 2**30, "free": snapshot.free_memory / 2**30}
    figures["asked, MiB"] = request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=LEAST_UTILIZATION)) / 2**20
    try:
        request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=0.92))
    except ValueError as error:
        figures["with 0.92"] = str(error).split(".")[0]
    else:
        raise AssertionError("92% of this GPU are free though a fifth is held")
    del held


if __name__ == "__main__":
    step_outcome.main(run)
