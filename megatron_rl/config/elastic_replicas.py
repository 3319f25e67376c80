"""Keys of elastic rollout replicas, which join and leave during a run. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.constraints import OURS, Count, NotNegative


@dataclass
class ElasticReplicas:
    """Part of the group `rollout`, for a rollout pool of an asynchronous run (`trainer.rollout_ahead`)."""

    min_replicas: Annotated[Count, OURS] = 0
    """Elastic rollout: smallest number of replicas. Further ones join as soon as the cluster has room; one leaves when
    its node is lost, its process gets SIGTERM, or a drain notice names it (`docs/scale/fault_tolerance.md`). The run
    ends (exit code 3) after trainer.repair_wait_s with fewer. 0: not elastic, nnodes x n_gpus_per_node ranks
    throughout."""
    max_replicas: Annotated[Count, OURS] = 0
    """With min_replicas: largest number of replicas at a time. 0: those of nnodes x n_gpus_per_node."""
    drain_url: Annotated[str | None, OURS] = None
    """With min_replicas: a URL that the controller reads every five seconds. Each line names replicas that are to
    leave, by the index of a replica or the address of a node, as in the file `drain` of the run's folder."""
    drain_s: Annotated[NotNegative, OURS] = 120.0
    """Seconds after which a replica that left because of SIGTERM may join again."""

    @property
    def is_elastic(self) -> bool:
        """Whether replicas may join and leave."""
        return self.min_replicas > 0
