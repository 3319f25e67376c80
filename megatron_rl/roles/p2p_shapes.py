"""Messages between pipeline stages whose shapes both sides know.

Where blocks differ in shape Megatron sends each tensor's shape before it, and the host waits for it. All stages cut the
same blocks, so both sides know the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

GROUPS_OF_SCHEDULE = ["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"]

Shape = tuple[int, int, int]
"""(columns, rows, hidden size) of a message."""


class KnownShapes(P2PCommunicator):
    """Megatron's messages of one pass in which tensors come from either side in the order of the blocks.

    So they do in the schedule without interleaved stages.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: Any, shapes: Sequence[Shape]) -> None:
        """shapes: of each block's message, the same forwards and backwards."""
        super().__init__(pp_group, config)
        self._from_previous, self._from_next = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the shapes of the tensors that come next from the stage before and from the one after."""
        nothing = (0, 0, 0)
        return next(self._from_previous) if recv_prev else nothing, next(self._from_next) if recv_next else nothing


def messages_of_known_shapes(pp_group: dist.ProcessGroup, config: Any, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Return what Megatron's schedule is given for one pass, so that stages do not tell each other shapes."""
    groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS_OF_SCHEDULE)
    return {"p2p_communicator": KnownShapes(pp_group, config, shapes), "pg_collection": groups}
