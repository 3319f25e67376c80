"""Let a CPU build of torch take fake tensors on "cuda", and let `torch.cuda` answer for a GPU that does not exist.

Reason: a rehearsal runs a rank's own code with device cuda where there is none. torch's fake tensors allow that only in
a build with CUDA: elsewhere autograd ends the process, and `torch.cuda` raises.
What it does: `load` brings a library (`fake_cuda.cpp`) with a device guard and hooks for cuda into the process,
before torch is imported; `apply` then gives `torch.cuda` the answers of `GPU`. Streams do nothing, but keep what has
come before in their order, so that somebody else can see what nothing orders (`stream_clocks.py`).
For a process of its own that ends when its rehearsal ends: nothing is undone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from third_party_patches.guard import TORCH, Patch, require_version
from third_party_patches.stream_clocks import HOST, LATEST, Clock, Queue, join

SOURCE = Path(__file__).with_suffix(".cpp")
NUM_DEVICES = 8
HOPPER = (9, 0)


@dataclass
class PretendedGPU:
    """Answers of `torch.cuda` in this process. allocated, peak: bytes, which somebody else counts.

    on_wait: called at every wait of the host for the device, with its reason. on_record_stream: called with a tensor
    and the stream that is recorded.
    """

    total_memory: int = 80 * 10**9
    device: int = 0
    allocated: int = 0
    peak: int = 0
    on_wait: Callable[[str], None] = lambda what: None
    on_record_stream: Callable[[Any, Any], None] = lambda tensor, stream: None

    def allocate(self, now: int) -> None:
        """Set the allocated bytes."""
        self.allocated, self.peak = now, max(self.peak, now)

    def reset_peak(self) -> None:
        """Begin a new measurement of `peak`."""
        self.peak = self.allocated


GPU = PretendedGPU()
"""The GPU of this process."""


def build(folder: Path) -> Path:
    """Compile the library into a folder; two seconds of g++. Raises FileNotFoundError where there is no g++."""
    command, library = build_command(folder)
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(folder)})
    return library


def build_command(folder: Path) -> tuple[list[str], Path]:
    """Return the command that compiles the library into a folder, and the file that it makes."""
    torch_folder, library = _torch_folder(), folder / "libpretended_cuda.so"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch_folder}/include", str(SOURCE)]
    command += ["-o", str(library), f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
    return command, library


def load(library: Path) -> None:
    """Load the built library. Raises RuntimeError where torch was imported before, and looked for CUDA in vain."""
    require_version(PATCH)
    if "torch" in sys.modules or ctypes.CDLL(str(library)).register_fake_cuda() != NUM_DEVICES:
        raise RuntimeError("the fake device must be loaded before torch is imported")


def _torch_folder() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("torch is not installed", name="torch")
    return str(spec.submodule_search_locations[0])


class PretendedEvent:
    """An event that is over as soon as somebody asks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        """Take the clock of the stream, or of the current one."""
        self.clock = dict((stream or current_stream()).clock)

    def wait(self, stream: Any = None) -> None:
        """Let the device wait: it costs the host nothing."""
        join((stream or current_stream()).clock, self.clock)

    def synchronize(self) -> None:
        """Let the host wait."""
        HOST.wait_for(self.clock)
        GPU.on_wait("event.synchronize")

    def query(self) -> bool:
        """Return True: all work before it is done."""
        HOST.wait_for(self.clock)
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds between two events."""
        return 0.0


class PretendedStream(Queue):
    """A stream whose work is done as soon as somebody asks."""

    cuda_stream = stream_id = device_index = priority = 0
    device_type = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        import torch

        super().__init__(f"side stream {next(_SIDE_STREAMS)}" if _DEFAULT else "the default stream")
        self.device = torch.device("cuda", GPU.device)
        self._before: list[Any] = []

    def __enter__(self) -> PretendedStream:
        self._before.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        set_stream(self._before.pop())

    def wait_stream(self, stream: Any) -> None:
        """Let the device wait: it costs the host nothing."""
        join(self.clock, stream.clock)

    def wait_event(self, event: Any) -> None:
        """Let the device wait: it costs the host nothing."""
        join(self.clock, event.clock)

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one, recorded here."""
        event = event or PretendedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait."""
        HOST.wait_for(self.clock)
        GPU.on_wait("stream.synchronize")

    def query(self) -> bool:
        """Return True: all its work is done."""
        HOST.wait_for(self.clock)
        return True


_OF_THREAD = threading.local()
_DEFAULT: list[PretendedStream] = []
_SIDE_STREAMS = count(1)


def default_stream(device: Any = None) -> PretendedStream:
    """Return the stream of threads that have set none, autograd's among them."""
    if not _DEFAULT:
        _DEFAULT.append(PretendedStream())
    return _DEFAULT[0]


def current_stream(device: Any = None) -> PretendedStream:
    """Return the stream of this thread."""
    return getattr(_OF_THREAD, "stream", None) or default_stream()


def set_stream(stream: Any) -> None:
    """Let this thread work on a stream; None: nothing changes."""
    _OF_THREAD.stream = stream or current_stream()


def synchronize(device: Any = None) -> None:
    """Let the host wait for all streams."""
    HOST.wait_for(LATEST)
    GPU.on_wait("device.synchronize")


def apply() -> None:
    """Give `torch.cuda`, and what is below it, the answers of `GPU`; `load` comes before."""
    import torch

    default_stream()
    for name, answer in {**_device_answers(), **_stream_answers(), **_memory_answers(), **_random_answers()}.items():
        setattr(torch.cuda, name, answer)
    for name, answer in _answers_below().items():
        setattr(torch._C, name, answer)
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, lambda *args, **options: 0)
    setattr(torch.Tensor, "record_stream", lambda tensor, stream: GPU.on_record_stream(tensor, stream))  # noqa: B010


def _index(device: Any) -> int:
    import torch

    index = device if isinstance(device, int) else torch.device(device).index
    return GPU.device if index is None else int(index)


def _device_answers() -> dict[str, Any]:
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=HOPPER[0],
        minor=HOPPER[1],
        total_memory=GPU.total_memory,
        multi_processor_count=132,
        is_integrated=False,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232448,
    )
    return {
        "_is_compiled": lambda: True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: GPU.device,
        "set_device": lambda device: setattr(GPU, "device", _index(device)),
        "get_device_capability": lambda device=None: HOPPER,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "is_bf16_supported": lambda *args, **options: True,
    }


def _stream_answers() -> dict[str, Any]:
    return {
        "Stream": PretendedStream,
        "Event": PretendedEvent,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "set_stream": set_stream,
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: False,
    }


def _memory_answers() -> dict[str, Any]:
    return {
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "memory_allocated": lambda device=None: GPU.allocated,
        "max_memory_allocated": lambda device=None: GPU.peak,
        "memory_reserved": lambda device=None: GPU.allocated,
        "max_memory_reserved": lambda device=None: GPU.peak,
        "reset_peak_memory_stats": lambda device=None: GPU.reset_peak(),
        "mem_get_info": lambda device=None: (GPU.total_memory - GPU.allocated, GPU.total_memory),
        "memory_stats": lambda device=None: {},
    }


def _random_answers() -> dict[str, Any]:
    import torch

    generator = torch.Generator()
    return {
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "default_generators": (generator,) * NUM_DEVICES,
    }


def _answers_below() -> dict[str, Any]:
    return {
        "_cuda_getDevice": lambda: GPU.device,
        "_cuda_getDeviceCount": lambda: NUM_DEVICES,
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_setDevice": lambda device: None,
        "_cuda_exchangeDevice": lambda device: GPU.device,
        "_cuda_maybeExchangeDevice": lambda device: GPU.device,
    }


PATCH = Patch(TORCH, apply, drop_when="a CPU build of torch runs autograd on fake tensors of cuda by itself")
