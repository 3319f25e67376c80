"""One rank of a pool: device, world, memory ledger, checkpoints, and the roles of its pool.

Engines are imported where they are built, so that the controller can name this class without loading them.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from megatron_rl.checkpoint.contents import reference_of
from megatron_rl.checkpoint.manifest import FileRecord
from megatron_rl.checkpoint.model_folder import model_folders
from megatron_rl.config.judge_engine import engine_replica_size
from megatron_rl.config.roles import ROLLOUT, Placement, PoolSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.trainer import GLOBAL_POOL
from megatron_rl.device import Device, choose_flash_attention, synchronize
from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.observe.memory_ledger import MemoryLedger, PhaseMemory
from megatron_rl.parallel.mpu import TrainGroups, initialize_mpu
from megatron_rl.parallel.rank_grid import RolloutGrid, train_grid
from megatron_rl.records import RoleState
from megatron_rl.roles.environment import RankEnvironment, choose_logging_level
from megatron_rl.roles.policy_followers import FollowingScorer
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.rendezvous import open_store
from megatron_rl.roles.role import Role, TrainedRole
from megatron_rl.roles.role_classes import build_role
from megatron_rl.roles.transfer_address import TransferSettings
from third_party_patches import apply_patches

if TYPE_CHECKING:
    from megatron_rl.checkpoint.memory_checkpoint_plan import CopyPlace
    from megatron_rl.hybrid_engine.rng import RNGState
    from megatron_rl.roles.memory_checkpoint import MemoryCheckpoint
    from megatron_rl.roles.role_checkpoint import ReferenceCheckpoint
    from megatron_rl.roles.rollout import Rollout
    from megatron_rl.roles.saving import UnfinishedSave


class RankHost:
    """The SPMD side of one pool on one rank. Unless a method says otherwise all ranks of the pool must be called.

    The constructor joins the pool's world and creates Megatron's groups; `build` makes the roles, the rollout last. If
    the pool is cut into replicas, each one is a world of its own, called "the pool" here; `spec` is the whole pool's.
    """

    def __init__(
        self,
        config: RunConfig,
        collective_timeout: timedelta = default_pg_timeout,
        pool: str = GLOBAL_POOL,
        environment: RankEnvironment | None = None,
    ) -> None:
        """environment: this rank's place; None: as the launcher's variables say."""
        environment = environment or RankEnvironment.read()
        placement = Placement.of(config)
        self.config = config
        self.spec = placement.pools[pool]
        self.device = Device(config.trainer.device, environment.local_rank)
        self.device.activate()
        chosen = choose_flash_attention(self.device.kind)
        if chosen and environment.rank == 0:
            print(f"attention of training in 16 bits: {chosen}")
        self.join_world(environment, collective_timeout, placement.generates)
        self.groups = initialize_pool(self.spec, environment.world_size, config.trainer.seed, collective_timeout)
        self.ledger = MemoryLedger(self.owned_memory, self.device.reset_peak_memory, self.device.peak_memory_bytes)
        places = (placement, self.spec, self.groups, self.device, environment)
        self.rank = Rank(config, *places, collective_timeout, self.ledger, model_folders(config))
        self.roles: dict[str, Role] = {}
        self.unfinished: UnfinishedSave | None = None
        self.copies: MemoryCheckpoint | None = None

    def join_world(self, environment: RankEnvironment, timeout: timedelta, generates: bool) -> None:
        """Patch the libraries of this process and join the pool's world."""
        apply_patches(self.device.kind, generates)
        environment.choose_interfaces()
        choose_logging_level()
        dist.init_process_group(
            self.device.backend,
            timeout=timeout,
            store=open_store(environment, timeout),
            rank=environment.rank,
            world_size=environment.world_size,
        )

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        """This rank's coordinates, for the controller's dispatch."""
        rank, grid = self.groups.rank, RolloutGrid(self.groups.grid, engine_replica_size(self.config, self.spec))
        return Coordinates(
            rank=rank,
            dp_rank=self.groups.dp_rank,
            dp_size=self.groups.grid.dp_size,
            dp_collector=self.groups.is_dp_collector,
            replica=grid.replica(rank),
            num_replicas=grid.num_replicas,
            replica_collector=grid.tp_rank(rank) == 0,
        )

    @remote_method(Dispatch.ONE_TO_ALL)
    def build(self, name: str, transfer: TransferSettings | None = None) -> None:
        """Make one role of this pool. transfer: for a rollout whose actor is in another pool."""
        spec = next(role for role in self.spec.roles if role.name == name)
        self.roles[name] = build_role(spec, self.rank, self.roles, transfer)
        self.ledger.note("init")

    def run(self, role: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of a role; its memory is recorded under its phase."""
        hosted = self.roles[role]
        body = getattr(hosted, name)
        phase = hosted.spec.phases.get(body.remote_method.phase, body.remote_method.phase)
        if body.remote_method.phase != "update":
            self._settle_parameters()
        if not phase:
            return body(*args, **kwargs)
        with self.ledger.phase(phase):
            answer = body(*args, **kwargs)
            # A phase's seconds and memory are those of its own work, not of the next that waits for it.
            synchronize(self.device.torch_device)
            return answer

    def _settle_parameters(self) -> None:
        """Finish gathering parameters, which may overlap with updates; every other method needs them whole."""
        for role in self.trained.values():
            role.trainable.sync.finish()

    # Memory

    def owned_memory(self) -> dict[str, int]:
        """Bytes of the tensors that this rank holds now, under the names of the memory plan."""
        return {name: size for role in self.roles.values() for name, size in role.memory().items()}

    @remote_method(Dispatch.ONE_TO_ALL)
    def take_memory(self) -> dict[str, PhaseMemory]:
        """Memory of this rank in every phase since the last call."""
        return self.ledger.take()

    # Checkpoints

    @property
    def trained(self) -> dict[str, TrainedRole]:
        """The trained roles that were built."""
        return {name: role for name, role in self.roles.items() if isinstance(role, TrainedRole)}

    @property
    def references(self) -> dict[str, ReferenceCheckpoint]:
        """References that follow a policy of another pool, as checkpoints keep them, by the policy's name."""
        roles = (role for role in self.roles.values() if isinstance(role, FollowingScorer))
        kept = {role.spec.follows and role.spec.follows.leader: role.kept for role in roles}
        return {leader: reference for leader, reference in kept.items() if leader and reference is not None}

    @property
    def rollout_rng(self) -> RNGState | None:
        """The generators' state at the end of the last generation; None if this rank does not generate."""
        return None if self._rollout is None else self._rollout.engine.rollout_rng

    @remote_method(Dispatch.ONE_TO_ALL, phase="save_checkpoint")
    def begin_save(self, folder: Path) -> dict[str, RoleState]:
        """Write every trained role that was built to its empty folder in `folder`; train mode only.

        Complete when `finish_save` returns files; no other save may begin before. Returns role -> its numbers.
        """
        from megatron_rl.roles.saving import begin_save

        if self.unfinished is not None:
            raise RuntimeError("a save is under way: finish_save() comes first")
        self._settle_parameters()
        with self.ledger.phase("save"):
            moved = {leader: reference for leader, reference in self.references.items() if reference.has_moved}
            beside_training = self.config.actor_rollout_ref.actor.checkpoint.async_save
            where = self.spec.name, self.groups, self.rollout_rng, self.device
            self.unfinished = begin_save(folder, self.trained, *where, moved, beside_training)
        return {name: role.checkpoint.state for name, role in self.trained.items()}

    @remote_method(Dispatch.ONE_TO_ALL, phase="save_checkpoint")
    def finish_save(self, wait: bool) -> dict[str, FileRecord] | None:
        """The files that this rank wrote since `begin_save`, by their path in its folder; None while some are not.

        wait: until all ranks are done. Only when the last rank's are there is the folder complete.
        """
        if self.unfinished is None:
            raise RuntimeError("no save is under way: begin_save() comes first")
        files = self.unfinished.finish(wait)
        if files is not None:
            self.unfinished = None
        return files

    @remote_method(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: Path, states: dict[str, RoleState]) -> bool:
        """Load all trained roles, and this rank's random state, from a complete checkpoint of any layout.

        states: the result of `begin_save`. Returns whether there was a random state for this layout.
        """
        from megatron_rl.roles.saving import load_rank_state

        for name, role in self.trained.items():
            role.checkpoint.load(folder / name, states[name])
        for leader, reference in self.references.items():
            reference.load(folder / leader)
        same_layout, rollout_rng = load_rank_state(folder, self.spec.name, self.groups)
        if self._rollout is not None:
            self._rollout.engine.rollout_rng = rollout_rng
        return same_layout

    # Copies in host memory

    @remote_method(Dispatch.ONE_TO_ALL, phase="copy_state")
    def copy_state(self, place: CopyPlace, step: int) -> dict[str, RoleState]:
        """Copy every trained role into host memory, where a repair of the run finds it; train mode only.

        Another node gets its copy in the background. Returns role -> its numbers.
        """
        from megatron_rl.roles.saving import generators_text

        self._settle_parameters()
        with self.ledger.phase("save"):
            tensors = {name: role.checkpoint.owned_tensors() for name, role in self.trained.items()}
            for leader, reference in self.references.items():
                tensors[reference_of(leader)] = reference.owned_tensors() if reference.has_moved else {}
            self._state_copies().take(place, step, tensors, generators_text(self.groups, self.rollout_rng))
        return {name: role.checkpoint.state for name, role in self.trained.items()}

    @remote_method(Dispatch.ONE_TO_ALL)
    def load_copy(self, place: CopyPlace, step: int, states: dict[str, RoleState]) -> bool:
        """Load all trained roles from copies of any layout. states: the result of `copy_state`.

        Returns whether there was a random state for this layout. Raises CopyLost if anything is missing in the copies.
        """
        from megatron_rl.roles.saving import restore_generators

        source = self._state_copies().load(place, step)
        for name, role in self.trained.items():
            role.checkpoint.load_from(source.role(name), states[name])
        for leader, reference in self.references.items():
            reference.load_from(source.role(reference_of(leader)))
        same_layout, rollout_rng = restore_generators(source.text(self.groups.rank), self.groups)
        if self._rollout is not None:
            self._rollout.engine.rollout_rng = rollout_rng
        return same_layout

    def _state_copies(self) -> MemoryCheckpoint:
        if self.copies is None:
            from megatron_rl.roles.memory_checkpoint import MemoryCheckpoint

            self.copies = MemoryCheckpoint(
                self.spec.name, self.groups.rank, self.rank.environment.node_id, self.rank.timeout
            )
        return self.copies

    @property
    def _rollout(self) -> Rollout | None:
        return cast("Rollout | None", self.roles.get(ROLLOUT))


def initialize_pool(spec: PoolSpec, world_size: int, seed: int, collective_timeout: timedelta) -> TrainGroups:
    """Megatron's groups in a pool's layout; every rank of the pool must call."""
    grid, vpp_size = train_grid(world_size, spec.layout), spec.layout.virtual_pipeline_model_parallel_size or 1
    return initialize_mpu(grid, seed, vpp_size, collective_timeout)
