"""Rehearse a step on a CPU with the sizes of a GPU: `python rehearsed_step.py STEP --device cuda`; `day.py` calls it.

A step that has `rehearse(figures)` does it itself. The code of any other runs under `megatron-rl rehearse`'s dispatch
mode: tensors on the GPU have shapes and no values, so that sizes, types, signatures and memory are checked, and the
step's own asserts, which compare values, are left out. NotRun: what asks the driver, or reads memory.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parents[1]), str(FOLDER.parent / "gpu_check_steps"), str(FOLDER / "steps")]
import step_outcome  # noqa: E402

ONLY_A_GPU = {
    "s03_rounds": "bytes of storages are copied, and a fake GPU has none",
    "s13_context": "the driver is asked what a context takes",
    "s14_topology": "nvidia-smi is asked",
    "s20_mapped_graphs": "memory is mapped by the driver, under a captured graph",
}

FEWER = {"s15_varlen": {"CASES": slice(None, None, 4)}}
"""Step -> its lists that are rehearsed in part: each kind of heads and each window, in a third of the time."""


def run(file: Path, figures: dict[str, Any]) -> None:
    """Rehearse the step of a file. Raises what it raises."""
    if file.stem in ONLY_A_GPU:
        raise step_outcome.NotRun(f"only on a GPU: {ONLY_A_GPU[file.stem]}")
    names: dict[str, Any] = {"__name__": "rehearsed", "__file__": str(file)}
    code = compile(file.read_text(), str(file), "exec", optimize=1)
    if "rehearse" in code.co_names:  # which are those that the module itself stores or reads
        exec(code, names)
        names["rehearse"](figures)
        return
    from third_party_patches.torch import fake_cuda

    with tempfile.TemporaryDirectory() as folder:
        fake_cuda.load(fake_cuda.build(Path(folder)))

    def body() -> None:
        exec(code, names)
        for name, some in FEWER.get(file.stem, {}).items():
            names[name] = names[name][some]
        names["run"]("cuda", False, figures)

    under_a_fake_gpu(body)
    figures["GB at the peak"] = round(fake_cuda.GPU.peak / 1e9, 2)
    most = fake_cuda.GPU.total_memory
    if fake_cuda.GPU.peak > most:
        raise MemoryError(f"{fake_cuda.GPU.peak / 1e9:.1f} GB at the peak, of a GPU with {most / 1e9:.1f}")


def under_a_fake_gpu(body: Any) -> None:
    """Call the body in this process with a GPU that does not exist."""
    import torch
    import torch._inductor.utils
    import torch.nested._internal.nested_tensor
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatron_rl.rehearse.dispatch_mode import RehearsalMode
    from megatron_rl.rehearse.memory_tracker import MemoryTracker
    from third_party_patches.torch import fake_cuda, fake_worlds

    fake_cuda.apply()
    fake_worlds.apply()
    on_cpu = torch.Generator

    class Generator(on_cpu):  # type: ignore[valid-type]
        """A generator of the host, whatever device it is asked for: nothing is drawn."""

        def __new__(cls, device: Any = None) -> Any:
            return on_cpu()

    vars(torch)["Generator"] = Generator
    torch._C._set_only_lift_cpu_tensors(True)
    # What is copied from the host is otherwise copied really, as a constant.
    setattr(FakeTensorMode, "avoid_device_init", True)  # noqa: B010  a property for mypy
    mode = RehearsalMode(torch.device("cuda", 0), MemoryTracker(fake_cuda.GPU.allocate), 0)
    fake_cuda.GPU.on_wait = mode.wait
    mode.begin("step")
    with mode:
        body()


if __name__ == "__main__":
    given = Path(sys.argv.pop(1))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    step_outcome.main(lambda device, small, figures: run(given, figures))
