"""Rounds between training and generation: what leaves comes back bit for bit, and the memory is there meanwhile, under
the same addresses."""

from __future__ import annotations

import importlib.util
from typing import Any

import step_outcome
import torch


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Allocated, reserved and free MiB in every round, while training's memory is away and when it is back."""
    from megatron_rl.device import Device, release_cached
    from megatron_rl.hybrid_engine.offload import HostCopy, Zeros
    from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer

    where = Device(device).torch_device
    numel = (4 << 20) if small or device == "cpu" else (1 << 30)
    state = [torch.randn(numel + extra, device=where) for extra in (0, 3, 17)]
    gradients = torch.randn(numel, device=where)
    before = [tensor.double().sum().item() for tensor in state]
    sample = [tensor[:: max(1, numel // 1000)].clone() for tensor in state]
    tag = "gpu_check" if device == "cpu" or has_vllm() else None
    figures["addresses"] = "kept" if tag else "not looked at: vLLM is not installed"
    foreign = MemoryBuffer(2 * numel, torch.float32, where, tag)
    view = foreign.view(7, (numel,))
    address = view.data_ptr()
    foreign.release()
    offloaded: list[HostCopy | Zeros] = [HostCopy(lambda: state), Zeros([gradients])]
    figures["rounds"] = []
    for number in range(3 if small else 20):
        for memory_part in offloaded:
            memory_part.offload()
        release_cached(where)
        away = memory(where)
        foreign.allocate()
        there = memory(where)
        view.fill_(float(number))
        assert bool((view == number).all())
        assert tag is None or view.data_ptr() == address, "the buffer came back at another address"
        foreign.release()
        if device == "cuda" and tag is not None:
            gained = memory(where)["free"] - there["free"]
            assert gained > 0.99 * foreign.num_bytes / 2**20, f"only {gained} MiB became free"
        for memory_part in reversed(offloaded):
            memory_part.reload()
        release_cached(where)
        figures["rounds"].append({"away": away, "back": memory(where)})
        assert [tensor.double().sum().item() for tensor in state] == before
        assert all(map(torch.equal, sample, [tensor[:: max(1, numel // 1000)] for tensor in state]))
        assert not gradients.any()
    if device == "cuda":
        first, last = figures["rounds"][1]["away"], figures["rounds"][-1]["away"]
        assert last["reserved"] <= first["reserved"] + 64, "memory that was given back is still reserved"


def has_vllm() -> bool:
    """Return True where memory can keep its addresses on CUDA."""
    return importlib.util.find_spec("vllm") is not None


def memory(device: torch.device) -> dict[str, float]:
    """In MiB; nothing on a CPU, where nobody counts."""
    if device.type == "cpu":
        return {}
    free, _ = torch.cuda.mem_get_info(device)
    numbers = {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "free": free,
    }
    return {name: round(number / 2**20, 1) for name, number in numbers.items()}


if __name__ == "__main__":
    step_outcome.main(run)
