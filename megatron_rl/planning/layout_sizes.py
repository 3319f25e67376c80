"""Parallel sizes by which the time of a step is estimated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of training and generation on `num_gpus` GPUs.

    stage_layers: layers of each stage; None: equal. etp: TP of experts; None: tp. rollout_dp: rollout TP groups that
    share experts.
    """

    num_gpus: int
    gpus_per_node: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    rollout_tp: int = 1
    rollout_dp: int = 1
    cp: int = 1
    cp_comm_type: str = "p2p"
    stage_layers: tuple[int, ...] | None = None
    etp: int | None = None

    @property
    def dp(self) -> int:
        """Copies of the model in training; CP of them share every sequence."""
        return self.num_gpus // (self.tp * self.pp)

    @property
    def expert_ranks(self) -> int:
        """Ranks that share all experts of a stage: EP x ETP consecutive ones."""
        return self.ep * (self.tp if self.etp is None else self.etp)

    @property
    def replicas(self) -> int:
        return self.num_gpus // self.rollout_tp
