"""An agent of a node that cannot be made."""

from __future__ import annotations

from typing import Any

from megatron_rl.cluster.node_agent import NodeAgent


class FailingAgent(NodeAgent):
    """Fails as one whose node has no room for the run's folder."""

    def __init__(self, *given: Any) -> None:
        raise OSError("no folder can hold this run's sockets")
