"""Open a run, whatever it trains: claim its folder, start its ranks, build its roles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from megatron_rl.cluster.cluster import Cluster
from megatron_rl.cluster.heartbeat_monitor import STACKS_FILE, HeartbeatLimits
from megatron_rl.cluster.hosting import Hosting
from megatron_rl.config.roles import ROLLOUT, Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.trainer import LOCAL, TrainerConfig
from megatron_rl.controller.lifecycle import Lifecycle, Stateful, StopPolicy
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.dispatch import CallInterval, RemoteMethod
from megatron_rl.ledger.planner.planned_steps import stall_timeout_s
from megatron_rl.observe.summary import layout_table
from megatron_rl.roles.bridge_address import AcrossBridge
from megatron_rl.roles.environment import handed_on, worker_environment
from megatron_rl.roles.host import RankHost
from megatron_rl.roles.kinds import KINDS
from megatron_rl.roles.preloaded import preloaded
from megatron_rl.roles.rank import sequence_work

Kind = TypeVar("Kind")


def take_folder(
    opened: ExitStack,
    logger: RunLogger,
    parts: Sequence[Stateful],
    table: Iterable[tuple[str, object, str]],
    lines: Iterable[str] = (),
    warnings: Iterable[str] = (),
) -> None:
    """Claim the run's folder, restore `parts` from the checkpoint to resume, and print `table`, lines and warnings.

    Raises ConfigError where another run is in the folder or the checkpoint does not fit, StorageError where the folder
    cannot be written to.
    """
    opened.enter_context(logger.folder)
    opened.enter_context(logger)
    for part in parts:
        logger.folder.give_back(part.load_state_dict)
    logger.console.print(layout_table(table))
    for line in lines:
        logger.say(line)
    for warning in (*warnings, *(f"skipped {reason}" for reason in logger.folder.start.skipped)):
        logger.warn(warning)
    if handed := handed_on():
        logger.say(f"every rank gets {', '.join(f'{name}={value}' for name, value in handed.items())}")


@dataclass(frozen=True)
class RunPools:
    """The pools of a run with their roles. hosts: pool -> the handle of its hosts."""

    placement: Placement
    cluster: Cluster = field(repr=False)
    hosts: dict[str, RankHost]

    @classmethod
    def open(
        cls, opened: ExitStack, placement: Placement, logger: RunLogger, stop_policy: StopPolicy, local: bool
    ) -> RunPools:
        """Start the ranks and build every role, in the order of the table; pools build at the same time.

        A rollout that is cut into replicas is built later, by the thread that drives the replicas.
        """
        hosting = hosting_of(logger.config, placement, CallObserver(stop_policy, logger))
        cluster = opened.enter_context(make_cluster(logger.config, placement, hosting, local))
        hosts = {name: pool.host(RankHost) for name, pool in cluster.pools.items()}
        building = []
        for role in placement.roles.values():
            if role.kind == ROLLOUT and role.pool in cluster.replicated:
                continue
            bridge = AcrossBridge() if role.kind == ROLLOUT and not placement.is_colocated else None
            building.append((role.name, hosts[role.pool].build(role.name, bridge)))
        for name, future in building:
            with logger.clock.waiting(f"build {name}"):
                future.get()
        return cls(placement, cluster, hosts)

    def handle(self, name: str, kind: type[Kind]) -> Kind:
        """The handle of a role. Raises KeyError for a role that the run does not have."""
        return self.cluster.pools[self.placement.roles[name].pool].handle(name, kind)


@dataclass(frozen=True)
class OpenRun:
    """The parts that every run has once it is ready for its first step. started: on the monotonic clock."""

    config: RunConfig
    pools: RunPools
    life: Lifecycle
    logger: RunLogger
    started: float


@dataclass(frozen=True)
class CallObserver:
    """Reports every call to the stop policy and to the clock of a run."""

    stop_policy: StopPolicy
    logger: RunLogger

    def before(self, method: RemoteMethod) -> None:
        """Raise StepAbandoned if the run is to stop instead."""
        self.stop_policy.before(method)

    def waiting(self, phase: str) -> AbstractContextManager[None]:
        """Show the phase in the progress line during a wait."""
        return self.logger.clock.waiting(phase)

    def ran(self, interval: CallInterval) -> None:
        """Add the seconds of a call to the clock."""
        self.logger.clock.ran(interval.pool, interval.phase, interval.start, interval.stop, interval.seconds)


def make_cluster(config: RunConfig, placement: Placement, hosting: Hosting, local: bool) -> Cluster:
    """Return the cluster that a run's pools are started in. Only the chosen kind is imported."""
    if local:
        from megatron_rl.cluster.in_process import InProcessCluster

        return InProcessCluster(placement.pools, hosting)
    from megatron_rl.cluster.process_cluster import ProcessCluster

    specs, device = list(placement.pools.values()), config.trainer.device
    modules = preloaded(device, generates=placement.generates)
    if config.trainer.launcher == LOCAL:
        from megatron_rl.cluster.local_launcher import LocalLauncher

        return ProcessCluster(LocalLauncher(device, modules, hosting.env), specs, hosting)
    from megatron_rl.cluster.ray_launcher import RayLauncher

    num_ranks = sum(spec.world_size for spec in specs)
    return ProcessCluster(RayLauncher(num_ranks, device, modules, hosting.env), specs, hosting)


def hosting_of(config: RunConfig, placement: Placement, observer: CallObserver) -> Hosting:
    """Settings that every rank starts with."""
    trainer = config.trainer
    limits = heartbeat_limits(config)
    # On a CPU all pools may share one machine's cores.
    ranks_per_node = sum(pool.size.num_ranks_per_node for pool in placement.pools.values())
    reduces_alone = placement.generates and not config.actor_rollout_ref.rollout.disable_custom_all_reduce
    sees_node = trainer.device == "cuda" and reduces_alone
    return Hosting(
        RankHost,
        (config, limits.collective_timeout),
        {name: KINDS[role.kind] for name, role in placement.roles.items()},
        trainer.device,
        env=worker_environment(
            trainer.device,
            ranks_per_node,
            sees_node=sees_node,
            updates_on_host=any(
                role.settings.optim.override_optimizer_config.optimizer_cpu_offload for role in placement.trained
            ),
        )
        | handed_on(),
        work=sequence_work(placement.leader.model_path) if trainer.balance_batch else None,
        limits=limits,
        observer=observer,
        replicated=replicated_pools(config, placement),
        sees_node=sees_node,
    )


def replicated_pools(config: RunConfig, placement: Placement) -> dict[str, int]:
    """Pool that is cut into replicas -> ranks of each. A replica may die and be restarted alone."""
    if not config.samples_ahead or placement.is_colocated:
        return {}
    role = placement.roles[ROLLOUT]
    return {role.pool: role.settings.tensor_model_parallel_size}


def raise_failures(cluster: Cluster) -> None:
    """Raise the failure of any pool, also of one that no call waits for."""
    for pool in cluster.pools.values():
        pool.raise_if_failed()


def stop_grace_s(trainer: TrainerConfig) -> float | None:
    """Seconds a run has to stop after a signal; None: it stops at once, because it saves nothing."""
    return trainer.stop_grace_s if trainer.save_freq > 0 else None


def heartbeat_limits(config: RunConfig) -> HeartbeatLimits:
    """After how long a rank counts as hung, and the file that then gets the stacks of all ranks."""
    trainer = config.trainer
    return HeartbeatLimits(
        stall_timeout_s(config), trainer.heartbeat_timeout_s, Path(trainer.default_local_dir) / STACKS_FILE
    )
