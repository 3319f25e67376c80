"""Move bytes along a schedule: pack, send and receive, unpack, with two messages under way at any time.

All tensors are bound once, at construction. Running an exchange makes no metadata and communicates nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.hybrid_engine.layout import Region
from megatron_rl.hybrid_engine.schedule import Leg, Step
from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.observe.liveness import made_progress

NUM_SCRATCH = 4
"""Messages that scratch memory has room for: two under way in each direction."""

Copies = list[tuple[Tensor, Tensor]]
"""(destination, source) of equal shape."""


def region_view(buffers: Mapping[int, Tensor], region: Region) -> Tensor:
    """The elements of `region` as a view; its buffer must be allocated."""
    return buffers[region.buffer].as_strided(region.shape, region.stride, region.offset)


def nothing() -> None:
    """Do nothing."""


@dataclass
class BoundStep:
    """A step with its tensors: `pack` before sending, `unpack` after receiving; neither for direct messages.

    after: how many of the first steps must be finished before this one begins (`Step.after`).
    """

    after: int
    send: tuple[Tensor, int] | None = None
    receive: tuple[Tensor, int] | None = None
    pack: Callable[[], None] = nothing
    unpack: Callable[[], None] = nothing


class StepRunner:
    """Takes steps in order, with two messages under way at any time. scratch: memory of packed messages."""

    def __init__(self, transport: Transport, scratch: MemoryBuffer) -> None:
        self.transport, self.scratch = transport, scratch

    def take(self, steps: Sequence[BoundStep], meanwhile: Callable[[], None] = nothing) -> None:
        """Take all steps; the scratch memory exists only meanwhile. meanwhile: what can be done next to the last ones.

        Every rank of the transport's group must take its own steps at the same time.
        """
        self.scratch.allocate()
        under_way: deque[tuple[list[dist.Work], BoundStep]] = deque()
        try:
            for number, step in enumerate(steps):
                # What is passed on must have arrived; else one message stays under way while the next is packed.
                while number - len(under_way) < max(step.after, number - 1):
                    self._finish(*under_way[0])
                    under_way.popleft()
                step.pack()
                under_way.append((self.transport.start(step.send, step.receive), step))
            meanwhile()
            while under_way:
                self._finish(*under_way[0])
                under_way.popleft()
        except BaseException as error:
            if self.transport.is_own:
                # Connections close when nothing names their messages; only then may the memory of those go.
                clear_frames(error.__traceback__)
                under_way.clear()
                self.transport.close()
            raise
        finally:
            # After a failure messages may still be arriving; their memory must not go first.
            for works, _ in under_way:
                for work in works:
                    with suppress(RuntimeError):
                        work.wait()
            self.scratch.release()

    def _finish(self, works: list[dist.Work], step: BoundStep) -> None:
        self.transport.finish(works, step.receive)
        step.unpack()
        # NCCL's wait lets the stream wait, not the host: what hangs must not look alive.
        if all(work.is_completed() for work in works):
            made_progress()


class Exchange(StepRunner):
    """One rank's schedule bound to its buffers.

    buffers: number -> flat tensor, all allocated during construction and at every `run`. Every rank of the
    transport's group must run its own exchange at the same time.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        local: Sequence[tuple[Region, Region]],
        buffers: Mapping[int, Tensor],
        transport: Transport,
    ) -> None:
        self._buffers = buffers
        packed = [leg.numel for step in steps for leg in (step.send, step.receive) if leg and not leg.is_direct]
        self._message_numel = max(packed, default=0)
        like = next(iter(buffers.values()))
        super().__init__(transport, MemoryBuffer(NUM_SCRATCH * self._message_numel, like.dtype, like.device))
        self._local = [(region_view(buffers, dest), region_view(buffers, source)) for source, dest in local]
        self._steps = [self._bind(step, number) for number, step in enumerate(steps)]
        self.scratch.release()

    @torch.no_grad()
    def run(self) -> None:
        """Move everything."""
        self.take(self._steps, partial(copy_all, self._local))

    def _bind(self, step: Step, number: int) -> BoundStep:
        bound = BoundStep(step.after)
        if step.send is not None:
            flat, scattered, in_order = self._bind_leg(step.send, scratch=number % 2)
            bound.send, bound.pack = (flat, step.send.peer), copying(in_order, scattered)
        if step.receive is not None:
            flat, scattered, in_order = self._bind_leg(step.receive, scratch=2 + number % 2)
            bound.receive, bound.unpack = (flat, step.receive.peer), copying(scattered, in_order)
        return bound

    def _bind_leg(self, leg: Leg, scratch: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """(the message, its regions in the buffers, the same regions inside the message)."""
        views = [region_view(self._buffers, region) for region in leg.regions]
        if leg.is_direct:
            return views[0], [], []
        flat = self.scratch.view(scratch * self._message_numel, (leg.numel,))
        sizes = [view.numel() for view in views]
        return flat, views, [part.view_as(view) for part, view in zip(flat.split(sizes), views, strict=True)]


def copying(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
    """A call that copies each source onto its destination."""
    return partial(copy_all, list(zip(destinations, sources, strict=True)))


def copy_all(copies: Copies) -> None:
    """Copy every source onto its destination."""
    for destination, source in copies:
        destination.copy_(source)
