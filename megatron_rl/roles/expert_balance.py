"""Balance of a trained role's experts: losses of its routers, and biases that follow the load of its experts.

begin(blocks) -> passes forward and backward -> metrics -> stepped, if the optimizer took the step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.observe.batch_metrics import balance_metrics, expert_load_metrics

if TYPE_CHECKING:
    from megatron_rl.roles.expert_bias import ExpertBias
    from megatron_rl.roles.expert_routing import ExpertRouting


class ExpertBalance:
    """All ranks must call every method.

    name: the role's name, with which metrics begin. bias: None for models that choose experts by scores alone. rate:
    step of the biases after an update; 0: they stay.
    """

    def __init__(self, name: str, routing: ExpertRouting, bias: ExpertBias | None, rate: float) -> None:
        self.name, self.routing, self.bias, self.rate = name, routing, bias, rate
        self._load: Tensor | None = None

    def begin(self, blocks: Sequence[MicroBatch]) -> None:
        """Forget the counts of earlier passes, and count the rows of an update over which losses are means."""
        for chunk in self.routing.chunks:
            chunk.begin()
        if self.routing.is_balanced:
            self.routing.count_rows(blocks)

    def metrics(self) -> dict[str, float]:
        """Load of experts and losses of routers in the update's passes. Raises RuntimeError as `must_be_done`."""
        routing = self.routing
        for chunk in routing.chunks:
            chunk.must_be_done()
        losses = balance_metrics(routing.losses(), routing.routed, self.name) if routing.is_balanced else {}
        self._load = routing.load()
        return expert_load_metrics(self._load, routing.routed, self.name) | losses

    def stepped(self) -> None:
        """Move the biases against the load of the update, after the optimizer has taken its step."""
        if self.rate and self.bias is not None and self._load is not None:
            self.bias.move(self._load, self.rate)
