"""A buffer that is given back while another stream has used it: how much stays reserved."""

from __future__ import annotations

from typing import Any

import step_outcome
import torch


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """MiB that are reserved and not allocated, after ten rounds with each kind of use."""
    if device == "cpu":
        raise step_outcome.NotRun("a CPU has no streams")
    from megatron_rl.device import Device, release_cached, side_stream
    from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer

    where = Device(device).torch_device
    numel = (1 << 24) if small else (1 << 28)
    for name, beside in (("one stream", False), ("two streams", True)):
        buffer = MemoryBuffer(numel, torch.float32, where)
        for _ in range(10):
            buffer.allocate()
            if beside:
                with side_stream(where):
                    buffer.data.fill_(1.0)
                    torch.cuda.current_stream(where).synchronize()
            buffer.data.fill_(2.0)
            buffer.release()
        torch.cuda.synchronize(where)
        release_cached(where)
        stranded = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
        figures[name] = {"stranded MiB": round(stranded / 2**20, 1)}
        assert stranded < buffer.num_bytes, f"{name}: a whole buffer stays reserved"


if __name__ == "__main__":
    step_outcome.main(run)
