"""Keys of rollout replicas that join and leave while a run goes on. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.constraints import OURS, Count, NotNegative


@dataclass
class ElasticReplicas:
    """Part of the group `rollout`, for a rollout pool that runs ahead of training (`trainer.rollout_ahead`)."""

    min_replicas: Annotated[Count, OURS] = 0
    """Replicas that generation needs. Others join as soon as the cluster has room for them, and every one leaves when
    its node is lost, its process is given SIGTERM, or a notice names it (`docs/scale/fault_tolerance.md`). The run ends
    (exit code 3) after trainer.repair_wait_s with fewer. 0: all of nnodes x n_gpus_per_node; none joins or leaves."""
    max_replicas: Annotated[Count, OURS] = 0
    """With min_replicas: the replicas that may be there at once. 0: those of nnodes x n_gpus_per_node."""
    drain_url: Annotated[str | None, OURS] = None
    """With min_replicas: a URL that the controller reads every five seconds. Its lines name the replicas that are to
    leave, as those of the file `drain` in the run's folder do: a replica's number or the address of a node."""
    drain_s: Annotated[NotNegative, OURS] = 120.0
    """Seconds after which a replica may come back that left because its process was given SIGTERM."""

    @property
    def is_elastic(self) -> bool:
        """Whether replicas join and leave."""
        return self.min_replicas > 0
