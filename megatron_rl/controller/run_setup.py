"""Open a run, whatever it trains: claim its folder, start its ranks, build its roles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

from megatron_rl.checkpoint.model_folder import ModelFolders
from megatron_rl.cluster.cluster import Cluster
from megatron_rl.cluster.heartbeat import STACKS_FILE, HeartbeatLimits
from megatron_rl.cluster.launcher import Launcher
from megatron_rl.cluster.pool_options import Hosting, PoolOptions
from megatron_rl.cluster.process_cluster import ProcessCluster, reserve_all
from megatron_rl.cluster.shm_files import HELD_BYTES
from megatron_rl.config.roles import REFERENCE, ROLLOUT, Placement, RoleSpec, elastic_pools, needed_pools
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.trainer import LOCAL, TrainerConfig
from megatron_rl.config.urls import without_secrets
from megatron_rl.controller.lifecycle import Lifecycle, Stateful, StopPolicy
from megatron_rl.controller.repairs import Repairs
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.dispatch import CallInterval, RemoteMethod
from megatron_rl.errors import ConfigError
from megatron_rl.node_check.cluster_check import NodeCheck
from megatron_rl.node_check.node_facts import shared_bytes
from megatron_rl.node_check.node_report import ACROSS, INSIDE, PAIR
from megatron_rl.node_check.node_rules import NodeRules
from megatron_rl.observe.appended_file import replace_file
from megatron_rl.observe.summary import PLAN_FILE, finite_or_null, layout_table
from megatron_rl.planning.batch_arithmetic import batch_rows
from megatron_rl.planning.hardware import planned_hardware
from megatron_rl.planning.memory import planned_memory
from megatron_rl.planning.planned_steps import stall_timeout_s
from megatron_rl.planning.repair_copies import copied_here, copied_on_node, shared_memory_problem
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.run_plan import plan_of
from megatron_rl.roles.environment import handed_on, worker_environment
from megatron_rl.roles.host import RankHost
from megatron_rl.roles.policy_followers import FollowedPolicy, FollowingScorer
from megatron_rl.roles.preloaded import preloaded
from megatron_rl.roles.rank import sequence_work
from megatron_rl.roles.role_classes import CLASSES
from megatron_rl.roles.scoring_roles import Reference
from megatron_rl.roles.transfer_address import TransferSettings

Kind = TypeVar("Kind")

FLOOR_SHARE = 0.1
"""Share of the planned bandwidth that must be there where no floor is set. NCCL over sockets and GPUs without NVLink
reach less, and a network of a quarter of the data sheet's more."""


def take_folder(
    opened: ExitStack,
    logger: RunLogger,
    parts: Sequence[Stateful],
    lines: Iterable[str] = (),
    warnings: Iterable[str] = (),
) -> None:
    """Claim the run's folder, restore `parts` from the checkpoint to resume, print layout, lines and warnings,
    and write the plan.

    Raises ConfigError where another run is in the folder or the checkpoint does not fit, StorageError where the folder
    cannot be written to.
    """
    opened.enter_context(logger.folder)
    opened.enter_context(logger)
    for part in parts:
        logger.folder.give_back(part.load_state_dict)
    if (earlier := logger.folder.set_aside) is not None:
        folder = logger.folder.path
        logger.say(f"{folder} had another run's files and no checkpoint to resume; they are now in {earlier}")
    logger.console.print(layout_table(batch_rows(logger.config)))
    for line in lines:
        logger.say(line)
    if logger.folder.is_finished and not logger.folder.is_repair:
        logger.say(nothing_to_train(logger.config.trainer, logger.folder.start.step))
    for warning in (*warnings, *(f"skipped {reason}" for reason in logger.folder.start.skipped)):
        logger.warn(warning)
    if handed := handed_on():
        logger.say(f"every rank gets {', '.join(f'{name}={value}' for name, value in handed.items())}")
    write_plan(logger)


def write_plan(logger: RunLogger) -> None:
    """Write plan.json to the run's folder: its configuration, and the numbers that `megatron-rl plan --json` prints, to
    read next to what was measured. Warns where that fails.

    A start that trains nothing keeps the plan of the steps that were taken.
    """
    if logger.folder.keeps(PLAN_FILE):
        return
    config, hardware, folders = logger.config, planned_hardware(logger.config), logger.folder.model_folders
    content = {"config": without_secrets(asdict(config)), "plan": plan_of(config, hardware, folders=folders).as_json()}
    try:
        text = json.dumps(finite_or_null(content), indent=1, allow_nan=False, default=str)
        replace_file(logger.folder.path / PLAN_FILE, text.encode() + b"\n")
    except OSError as error:
        logger.warn(f"{PLAN_FILE} could not be written: {error}")


def nothing_to_train(trainer: TrainerConfig, step: int) -> str:
    """Return the line of a run whose last step, `step`, was taken before, with the keys that go further."""
    further = f"trainer.total_training_steps={2 * step}"
    if trainer.total_epochs is not None:  # the smaller limit counts
        further = f"trainer.total_epochs={2 * max(1, trainer.total_epochs)} {further}"
    done = f"{step} of {trainer.num_steps} steps were done before: nothing is trained, and their records stay"
    return f"{done}; to go further: {further}, or another trainer.default_local_dir"


@dataclass(frozen=True)
class RunPools:
    """The pools of a run with their roles. hosts: pool -> the handle of its hosts."""

    placement: Placement
    cluster: Cluster = field(repr=False)
    hosts: dict[str, RankHost]

    @classmethod
    def open(
        cls,
        opened: ExitStack,
        placement: Placement,
        logger: RunLogger,
        stop_policy: StopPolicy,
        local: bool,
        repairs: Repairs,
    ) -> RunPools:
        """Start the ranks and build every role, in the order of the table; pools build at the same time.

        A rollout that is cut into replicas is built later, by the thread that drives the replicas.
        """
        num_ranks, what = placement.world_size, "process" if placement.world_size == 1 else "processes"
        logger.title(f"Starting {num_ranks} {what}: {', '.join(placement.roles)}")
        hosting = hosting_of(logger.config, placement, CallObserver(stop_policy, logger), repairs.folders)
        made = make_cluster(logger.config, placement, hosting, local, logger.say, repairs)
        with logger.clock.waiting("init"):
            cluster = opened.enter_context(made)
        logger.watch.ask(lambda phase: cluster.at_work())
        hosts = {name: pool.host(RankHost) for name, pool in cluster.pools.items()}
        building = []
        for role in placement.roles.values():
            if role.kind.generates and role.pool in cluster.replicated:
                continue
            transfer = TransferSettings() if role.kind.generates and not placement.is_colocated else None
            building.append((role.name, hosts[role.pool].build(role.name, transfer)))
        for name, future in building:
            with logger.clock.waiting(f"build {name}"):
                future.get()
        pools = cls(placement, cluster, hosts)
        if placement.followers:
            with logger.clock.waiting("connect followers"):
                pools.connect_followers()
        return pools

    def handle(self, name: str, kind: type[Kind]) -> Kind:
        """The handle of a role. Raises KeyError for a role that the run does not have."""
        return self.cluster.pools[self.placement.roles[name].pool].handle(name, kind)

    # Roles of other pools that take weights of a policy: a reference that moves, a teacher that is the policy

    def connect_followers(self) -> None:
        """Connect the pools of every policy and of the roles that follow it, once these are built."""
        for role in self.placement.followers:
            policy, follower = self._ends_of(role)
            address = policy.offer_to(role.name, self.placement.pool_of(role.name).world_size).get()
            joining = policy.join_follower(role.name, address), follower.join_policy(address)
            for end in joining:
                end.get()

    def begin_followers(self, step: int) -> None:
        """Send the weights after `step`, at which a run begins, to roles that are the policy in every step."""
        self._send((role for role in self.placement.followers if role.follows and not role.follows.is_kept), step)

    def move_followers(self, step: int) -> None:
        """Send the weights after a step to the roles that take them then."""
        due = (role for role in self.placement.followers if role.follows and step % role.follows.every == 0)
        self._send(due, step)

    def _send(self, roles: Iterable[RoleSpec], step: int) -> None:
        """Send the weights after a step to roles; returns when these have mixed them in."""
        for role in roles:
            policy, follower = self._ends_of(role)
            moving = policy.send_to(role.name, step), follower.take_weights(step)
            for end in moving:
                end.get()

    def _ends_of(self, role: RoleSpec) -> tuple[FollowedPolicy, FollowingScorer]:
        """The handles of the policy that a role follows, and of the role."""
        assert role.follows is not None
        leader = self.placement.roles[role.follows.leader]
        policy, follower = (self.handle(one.name, CLASSES[one.kind.name]) for one in (leader, role))
        return cast(FollowedPolicy, policy), cast(FollowingScorer, follower)


@dataclass(frozen=True)
class RunBase:
    """The parts that every run has once it is ready for its first step."""

    config: RunConfig
    pools: RunPools
    life: Lifecycle
    logger: RunLogger
    repairs: Repairs

    def refresh_reference(self, step: int) -> None:
        """Move the reference to the policy if it is to follow and this step, whose update is over, is one of those.
        Roles of other pools that follow get their weights, too.
        """
        self.pools.move_followers(step)
        reference = self.pools.placement.roles.get(REFERENCE)
        is_beside = reference is not None and reference.follows is None
        if is_beside and self.config.actor_rollout_ref.ref.is_refreshed_after(step):
            self.pools.handle(REFERENCE, Reference).refresh().get()


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


def make_cluster(
    config: RunConfig,
    placement: Placement,
    hosting: Hosting,
    local: bool,
    say: Callable[[str], None],
    repairs: Repairs,
) -> Cluster:
    """Return the cluster that a run's pools are started in, which checks its nodes first if the run is to.

    Only the chosen kind is imported. say: takes a line for people. repairs: keep the launcher.
    """
    if local:
        from megatron_rl.cluster.in_process import InProcessCluster

        return InProcessCluster(placement.pools, hosting)

    modules = preloaded(config.trainer.device, generates=placement.generates)
    if config.trainer.launcher == LOCAL and config.trainer.max_repairs and not repairs.attempt:
        refuse_without_room(config, repairs.folders)
    launcher = repairs.launcher(lambda: make_launcher(config, placement, hosting, modules))
    check = node_check(config, hosting, say) if checks_nodes(config) else None
    if check is not None and repairs.attempt:  # copies of the attempt before take it already
        check = replace(check, rules=replace(check.rules, least_shared_bytes={}))
    return ProcessCluster(launcher, [*placement.pools.values()], hosting, check)


def refuse_without_room(config: RunConfig, folders: ModelFolders) -> None:
    """Raise ConfigError where copies for repairs need more shared memory than this machine has."""
    needed, free = copied_here(config, RunModels(config, folders).pools), shared_bytes()
    if free is not None and (problem := shared_memory_problem(needed, free)):
        raise ConfigError(f"this run cannot start: {problem}")


def make_launcher(config: RunConfig, placement: Placement, options: PoolOptions, modules: Sequence[str]) -> Launcher:
    """Return what starts the ranks of a run. Only the chosen kind is imported. modules: that nodes import once."""
    device = config.trainer.device
    if config.trainer.launcher == LOCAL:
        from megatron_rl.cluster.local_launcher import LocalLauncher

        return LocalLauncher(device, modules, options.env)
    from megatron_rl.cluster.ray_launcher import RayLauncher

    further = sum(
        max(0, pool.max_replicas * pool.replica.world_size - placement.pools[name].world_size)
        for name, pool in elastic_pools(config).items()
    )
    return RayLauncher(placement.world_size + further, device, modules, options.env)


def checks_nodes(config: RunConfig) -> bool:
    """Whether a run checks its nodes before it builds roles: as `trainer.cluster_check` says."""
    trainer = config.trainer
    several = any(pool.size.num_nodes > 1 for pool in Placement.of(config).pools.values())
    return trainer.device == "cuda" and several if trainer.cluster_check is None else trainer.cluster_check


def node_rules(config: RunConfig) -> NodeRules:
    """Return what a run demands of its nodes. The configuration must have passed preflight. Raises ConfigError as
    `planned_hardware`.
    """
    trainer, hardware = config.trainer, planned_hardware(config)
    on_gpus = trainer.device == "cuda"
    per_node = {pool.size.num_ranks_per_node for pool in Placement.of(config).pools.values()}
    planned = {
        INSIDE: (trainer.min_link_bandwidth_gbs, hardware.link_bandwidth),
        ACROSS: (trainer.min_node_bandwidth_gbs, hardware.network_bandwidth * min(per_node)),
    }
    floors = {
        kind: FLOOR_SHARE * rate / 1e9 if given is None else given
        for kind, (given, rate) in planned.items()
        if on_gpus or given is not None
    }
    if ACROSS in floors:
        floors[PAIR] = floors[ACROSS]
    copied = copied_on_node(config, RunModels(config).pools) if trainer.max_repairs else {}
    if not on_gpus:
        return NodeRules(on_gpus, floors, least_shared_bytes=copied)
    needed = {
        pool: int(max(sum(held.values()) for held in phases.values()) + hardware.context_bytes)
        for pool, phases in planned_memory(config).items()
    }
    return NodeRules(on_gpus, floors, needed, copied)


def node_check(config: RunConfig, options: PoolOptions, say: Callable[[str], None]) -> NodeCheck:
    """Return the check of a run's nodes. options: those of its ranks. say: takes a line for people."""
    return NodeCheck(node_rules(config), config.trainer.device, options, say)


def check_nodes(config: RunConfig, say: Callable[[str], None]) -> None:
    """Check the nodes of a run and start nothing on them. say: takes a line for people.

    Raises ConfigError with all faults, and as `make_launcher`'s choices, and WorkerFailure where a process dies.
    """
    placement = Placement.of(config)
    options = rank_options(config, placement)
    modules = () if config.trainer.device == "cuda" else ("megatron_rl.node_check.cluster_check",)
    with ExitStack() as opened:
        launcher = opened.enter_context(make_launcher(config, placement, options, modules))
        node_check(config, options, say)(reserve_all(launcher, needed_pools(config), opened))


def hosting_of(config: RunConfig, placement: Placement, observer: CallObserver, folders: ModelFolders) -> Hosting:
    """Settings that every rank starts with."""
    trainer, options = config.trainer, rank_options(config, placement)
    work = sequence_work(folders[placement.leader.model_path])
    work = replace(work, by_prompt=config.actor_rollout_ref.model.enable_tree_training)
    limits = heartbeat_limits(config, folders)
    return Hosting(
        RankHost,
        (config, limits.collective_timeout),
        {name: CLASSES[role.kind.name] for name, role in placement.roles.items()},
        trainer.device,
        env=options.env,
        work=work if trainer.balance_batch else None,
        limits=limits,
        observer=observer,
        replicated=replicated_pools(config, placement),
        elastic=elastic_pools(config),
        sees_node=options.sees_node,
    )


def rank_options(config: RunConfig, placement: Placement) -> PoolOptions:
    """Environment and GPUs of every rank, whatever it hosts."""
    device = config.trainer.device
    # On a CPU all pools may share one machine's cores.
    ranks_per_node = sum(pool.size.num_ranks_per_node for pool in placement.pools.values())
    reduces_alone = placement.generates and not config.actor_rollout_ref.rollout.disable_custom_all_reduce
    sees_node = device == "cuda" and reduces_alone
    updates_on_host = any(
        role.settings.optim.override_optimizer_config.optimizer_cpu_offload for role in placement.trained
    )
    variables = worker_environment(
        device,
        ranks_per_node,
        sees_node=sees_node,
        updates_on_host=updates_on_host,
        survives_losses=bool(replicated_pools(config, placement)),
    )
    held_bytes = config.trainer.held_bytes
    variables[HELD_BYTES] = "inf" if held_bytes is None else str(held_bytes)
    return PoolOptions(env=variables | handed_on(), sees_node=sees_node)


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


def heartbeat_limits(config: RunConfig, folders: ModelFolders | None = None) -> HeartbeatLimits:
    """After how long a rank counts as hung, and the file that then gets the stacks of all ranks."""
    trainer = config.trainer
    return HeartbeatLimits(
        stall_timeout_s(config, folders), trainer.heartbeat_timeout_s, Path(trainer.default_local_dir) / STACKS_FILE
    )
