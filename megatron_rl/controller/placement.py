"""Where the ranks of a run live: what runs on each, what kind of cluster, and when a rank counts as hung."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.cluster.cluster import Cluster, Hosting
from megatron_rl.cluster.heartbeat_monitor import STACKS_FILE, HeartbeatLimits
from megatron_rl.config.roles import ROLLOUT, Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.controller.lifecycle import StopPolicy
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.dispatch import CallInterval, RemoteMethod
from megatron_rl.ledger.planner.stall import stall_timeout_s
from megatron_rl.roles.environment import handed_on, worker_environment
from megatron_rl.roles.host import RankHost
from megatron_rl.roles.kinds import KINDS
from megatron_rl.roles.preloaded import preloaded
from megatron_rl.roles.rank import sequence_work


@dataclass(frozen=True)
class CallObserver:
    """Tells the pace of the run, and its clock, what is called."""

    stop_policy: StopPolicy
    logger: RunLogger

    def before(self, method: RemoteMethod) -> None:
        """The run may stop instead."""
        self.stop_policy.before(method)

    def waiting(self, phase: str) -> AbstractContextManager[None]:
        """The progress line shows it."""
        return self.logger.clock.waiting(phase)

    def ran(self, interval: CallInterval) -> None:
        """Its seconds count."""
        self.logger.clock.ran(interval.pool, interval.phase, interval.start, interval.stop, interval.seconds)


def make_cluster(placement: Placement, hosting: Hosting, local: bool) -> Cluster:
    """Where the pools of a run live; the other kind of cluster is not even imported."""
    if local:
        from megatron_rl.cluster.local_cluster import LocalCluster

        return LocalCluster(placement.pools, hosting)
    from megatron_rl.cluster.ray_cluster import RayCluster

    return RayCluster(list(placement.pools.values()), hosting)


def hosting_of(config: RunConfig, placement: Placement, observer: CallObserver) -> Hosting:
    """What runs on every rank."""
    trainer = config.trainer
    limits = watch_limits(config)
    # On a CPU all pools may share one machine's cores.
    ranks_per_node = sum(pool.size.num_ranks_per_node for pool in placement.pools.values())
    sees_node = trainer.device == "cuda" and not config.actor_rollout_ref.rollout.disable_custom_all_reduce
    return Hosting(
        RankHost,
        (config, limits.collective_timeout),
        {name: KINDS[role.kind] for name, role in placement.roles.items()},
        trainer.device,
        env=worker_environment(trainer.device, ranks_per_node, sees_node=sees_node) | handed_on(),
        work=sequence_work(placement.leader.model_path) if trainer.balance_batch else None,
        limits=limits,
        observer=observer,
        replicated=replicated_pools(config, placement),
        sees_node=sees_node,
        preload=preloaded(trainer.device, generates=ROLLOUT in placement.roles),
    )


def replicated_pools(config: RunConfig, placement: Placement) -> dict[str, int]:
    """Pools that are cut into replicas, which may die and start again alone -> ranks of each."""
    if not config.samples_in_slices or placement.is_colocated:
        return {}
    role = placement.roles[ROLLOUT]
    return {role.pool: role.settings.tensor_model_parallel_size}


def look_round(cluster: Cluster) -> None:
    """Raise where a pool has failed that nobody calls now."""
    for pool in cluster.pools.values():
        pool.raise_if_failed()


def stop_grace_s(trainer: TrainerConfig) -> float | None:
    """Seconds that a signal leaves a run to stop in; None, at once, where nothing is saved."""
    return trainer.stop_grace_s if trainer.save_freq > 0 else None


def watch_limits(config: RunConfig) -> HeartbeatLimits:
    """When a rank counts as hung, and where the run's folder keeps the stacks of all ranks then."""
    trainer = config.trainer
    return HeartbeatLimits(
        stall_timeout_s(config), trainer.heartbeat_timeout_s, Path(trainer.default_local_dir) / STACKS_FILE
    )
