"""Graphs that are captured on a pretended GPU, and what CUDA refuses meanwhile: what waits for the device, what copies
from or to pageable memory, and what allocates elsewhere than in the graph's pool.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from megatron_rl.rehearse.dispatch_mode import RehearsalMode

aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)
NOT_THE_CAUSE = ("/torch/", "/megatron_rl/rehearse/", "/tests/rehearse/fake_", "/third_party_patches/torch/")
"""Parts of the paths of files whose lines do what others ask for."""
TRACED = "<eval_with_key>"
"""What torch names the file of a traced graph's code."""


class CaptureError(RuntimeError):
    """An action that CUDA refuses while a graph is captured, or whose result no replay renews."""


def line_of_cause() -> str:
    """Return file and number of the innermost line that is neither torch's nor a rehearsal's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(TRACED):
            return _traced_from(name, frame.f_lineno)
        if name.startswith("/") and not any(part in name for part in NOT_THE_CAUSE):
            return f"{name.split('/site-packages/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"


def _traced_from(name: str, number: int) -> str:
    """The line whose operation a line of a graph's code is: torch writes it above, where it knows it."""
    for line in reversed(linecache.getlines(name)[:number]):
        if "# File: " in line:
            return line.split("# File: ")[1].split(" ")[0]
    return f"{name}:{number}"


class CapturingMode(RehearsalMode):
    """A rehearsal's mode that knows when a graph is captured.

    num_captured, num_replayed: graphs. made: allocations of captured graphs, with their lines.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_capturing = False
        self.num_captured = self.num_replayed = 0
        self.made: list[tuple[weakref.ref[Any], str]] = []
        self._pinned: set[int] = set()

    def begin_capture(self) -> None:
        """Begin a graph; one at a time."""
        if self.is_capturing:
            raise CaptureError(f"a graph inside of another at {line_of_cause()}")
        self.is_capturing = True

    def end_capture(self) -> None:
        """End it."""
        self.is_capturing = False
        self.num_captured += 1

    def replay(self) -> None:
        """Count a replay, which computes nothing."""
        self.num_replayed += 1

    def refuse(self, what: str) -> None:
        """Raise CaptureError if a graph is captured."""
        if self.is_capturing:
            raise CaptureError(f"{what} at {line_of_cause()} while a graph is captured")

    def must_be_gone(self) -> None:
        """Raise CaptureError for what graphs allocated and something still holds: later replays write into it."""
        if left := sorted({line for storage, line in self.made if storage() is not None}):
            raise CaptureError(f"memory of captured graphs is held after them, allocated at {', '.join(left)}")

    def wait(self, what: str) -> None:
        """Note that the host waits for the device, which it must not do in a graph."""
        self.refuse(f"a wait ({what})")
        super().wait(what)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self.is_capturing and func in COPIES:
            self._refuse_pageable(args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _refuse_pageable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        asked = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        crosses = 0 < len(on_host) < len(tensors) or asked == ("cuda" if on_host else "cpu")
        is_pinned = asked != "cpu" and all(each.untyped_storage()._cdata in self._pinned for each in on_host)
        if crosses and not is_pinned:
            self.refuse("a copy of pageable memory")

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # type: ignore[override]
        out = super()._on_host(func, args, kwargs)
        if func is aten._pin_memory.default or kwargs.get("pin_memory"):
            self.refuse("an allocation of pinned memory")
            storage = out.untyped_storage()
            self._pinned.add(storage._cdata)
            weakref.finalize(storage, self._pinned.discard, storage._cdata)
        return out

    def _note(self, func: Any, outputs: list[FakeTensor]) -> None:
        known = set(self.memory._live)
        super()._note(func, outputs)
        if self.is_capturing:
            new = [each.untyped_storage() for each in outputs if each.untyped_storage()._cdata not in known]
            self.made += [(weakref.ref(storage), line_of_cause()) for storage in new]

    def weakly(self, tensor: FakeTensor) -> FakeTensor:
        """Return a tensor in the same place that holds nothing."""
        size = tensor.untyped_storage().nbytes()
        whole = self.unheld_bytes(size).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class PretendedGraph:
    """A graph that does nothing when it is replayed."""

    mode: CapturingMode

    def __init__(self, keep_graph: bool = False) -> None:
        pass

    def capture_begin(self, *args: Any, **options: Any) -> None:
        """Begin to capture."""
        self.mode.begin_capture()

    def capture_end(self) -> None:
        """End."""
        self.mode.end_capture()

    def replay(self) -> None:
        """Replay."""
        self.mode.replay()

    def pool(self) -> tuple[int, int]:
        """Return the handle of its pool."""
        return (0, 1)

    def reset(self) -> None:
        """Forget it."""


def apply(mode: CapturingMode) -> None:
    """Let `torch.cuda` capture graphs with a mode."""
    PretendedGraph.mode = mode

    def other_pool(*args: Any, **options: Any) -> AbstractContextManager[None]:
        mode.refuse("an allocation in another pool")
        return nullcontext()

    for module in (torch.cuda, torch.cuda.graphs):
        vars(module)["CUDAGraph"] = PretendedGraph
        vars(module)["graph_pool_handle"] = lambda: (0, 1)
    for module in (torch.cuda, torch.cuda.memory):
        vars(module)["use_mem_pool"] = other_pool
    torch.cuda.is_current_stream_capturing = lambda: mode.is_capturing
    torch._C._host_emptyCache = lambda: None
