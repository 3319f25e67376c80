"""Messages that are late: real ones of torch.distributed, which begin and arrive when chance says."""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.hybrid_engine.exchange import Transport

LONGEST_PAUSE_S = 0.01


@dataclass(eq=False)
class Half:
    """A message seen from one of its ends; those `before` it go the same way and begin first."""

    begin: Callable[[], list[dist.Work]]
    before: deque[Half]
    works: list[dist.Work] = field(default_factory=list)

    def ensure_begun(self) -> None:
        while self in self.before:
            first = self.before.popleft()
            first.works = first.begin()


@dataclass
class LateWork:
    """What `start` began, or did not begin yet. arrived: (memory of the receiver, what came for it)."""

    halves: list[Half]
    arrived: tuple[Tensor, Tensor] | None
    is_over: bool = False

    def wait(self) -> None:
        for half in self.halves:
            half.ensure_begun()
        for half in self.halves:
            for work in half.works:
                work.wait()
        if self.arrived is not None:
            self.arrived[0].copy_(self.arrived[1])
        self.is_over = True

    def is_completed(self) -> bool:
        return self.is_over


class LateMessages(Transport):
    """Pauses before messages; begins half of them only when somebody waits for them, as a slow network would.

    The memory that a message is received into holds NaN, or 255 in each byte, from the start of the message to its end.
    """

    def __init__(self, group: dist.ProcessGroup, seed: int) -> None:
        super().__init__(group)
        self._chance = random.Random(f"{seed} {dist.get_rank()}")
        self._not_begun: dict[tuple[str, int], deque[Half]] = defaultdict(deque)

    def start(self, send: tuple[Tensor, int] | None, receive: tuple[Tensor, int] | None) -> list[LateWork]:
        """As of Transport, for floating-point tensors and bytes."""
        time.sleep(self._chance.choice([0.0, 0.0, self._chance.uniform(0, LONGEST_PAUSE_S)]))
        halves, arrived = [], None
        begin = super().start
        if send is not None:
            halves.append(self._half(("to", send[1]), lambda: begin(send, None)))
        if receive is not None:
            memory, peer = receive
            arrived = (memory, torch.empty_like(memory))
            memory.fill_(math.nan if memory.is_floating_point() else 255)
            halves.append(self._half(("from", peer), lambda: begin(None, (arrived[1], peer))))
        return [LateWork(halves, arrived)]

    def _half(self, way: tuple[str, int], begin: Callable[[], list[dist.Work]]) -> Half:
        half = Half(begin, self._not_begun[way])
        half.before.append(half)
        if self._chance.random() < 0.5:
            half.ensure_begun()
        return half
