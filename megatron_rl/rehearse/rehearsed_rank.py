"""One rank: its roles are built, and run the passes of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.columns import COLUMNS
from megatron_rl.config.roles import ACTOR, ROLLOUT, PassSpec, Placement, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.hybrid_engine.hybrid_engine import HybridEngine
from megatron_rl.observe.memory_ledger import PhaseMemory
from megatron_rl.planning.run_models import RunModels
from megatron_rl.records import Batch
from megatron_rl.rehearse.dispatch_mode import RehearsalMode
from megatron_rl.rehearse.rehearsed_rollout import rehearsed_engine
from megatron_rl.rehearse.rehearsed_save import record_objects, rehearse_save
from megatron_rl.rehearse.rehearsed_transfer import JointRanks, RehearsedReceiver
from megatron_rl.rehearse.synthetic_batches import (
    ANSWERS,
    UNEVEN,
    half_as_long,
    lengths_of,
    num_rows,
    of_teachers,
    synthetic_batch,
    synthetic_pairs,
    vocabulary_of,
)
from megatron_rl.rehearse.synthetic_images import (
    IMAGE_FEATURES,
    PATCHES,
    POLICY_FEATURES,
    add_images,
    images_alone,
    reads_images,
)
from megatron_rl.roles.environment import RankEnvironment
from megatron_rl.roles.host import RankHost
from third_party_patches import apply_patches

RESHARD, LEAVE, SAVE, IMAGES = "reshard", "leave", "save", "images"
"""Phases of entering and leaving rollout mode, of a save, and of the pass over images."""
WARM_UP = "first "
"""Begins the name of the first update of a role, whose rows are uneven and which makes Adam's moments."""


class RehearsedHost(RankHost):
    """A rank whose world has no other ranks."""

    def join_world(self, environment: RankEnvironment, timeout: timedelta, generates: bool) -> None:
        """Patch the libraries, without vLLM's, and make the world of torch's fake groups."""
        apply_patches("rehearsal", generates)
        dist.init_process_group(rank=environment.rank, world_size=environment.world_size)


class RehearsedRank:
    """The phases of one rank, in the order of a step. Everything runs under `mode`.

    seconds: phase -> how long its rehearsal took.
    """

    def __init__(
        self,
        config: RunConfig,
        pool: str,
        environment: RankEnvironment,
        mode: RehearsalMode,
        joint: JointRanks | None = None,
    ) -> None:
        """joint: the ranks of the weight transfer to a rollout in another pool; None: there is none."""
        self.config, self.mode, self.joint = config, mode, joint
        self.images = RunModels(config).images()
        self.seconds: dict[str, float] = {}
        self.host: RehearsedHost = self._phase(
            "start", lambda: RehearsedHost(config, pool=pool, environment=environment)
        )
        record_objects(mode)

    def run(self) -> None:
        """Build the roles; update each once, for Adam's moments; then score and update, enter rollout
        mode and leave it, or send or receive weights, and save, which is what is measured.
        """
        roles = self.host.spec.megatron_roles
        for role in roles:
            self._phase("init", lambda role=role: self.host.build(role.name))  # type: ignore[misc]
        transitions = self._transitions()
        for role in self.trained:
            self._update(role, WARM_UP, UNEVEN)
        self.taken = {"init": self._take_memory()["init"]}
        actor = self.host.spec.role(ACTOR)
        if self.images is not None and actor is not None:
            if not actor.trains_tower or Placement.of(self.config).scores_beside_policy:
                self._call(actor, IMAGES, "image_features", images_alone(self.images))
            if actor.trains_tower:
                self._call(actor, IMAGES, "policy_features", images_alone(self.images), with_patches=True)
        for role in roles:
            if role.score is not None:
                batch = self._batch(role, role.score, self.config.batch_sizes.num_samples)
                self._call(role, role.score.phase, role.score.call.method, batch)
        for role in self.trained:
            self._update(role)
        for name, body in transitions.items():
            self._phase(name, body)
        if self.host.trained:
            self._phase(SAVE, lambda: rehearse_save(self.host))
        self.taken |= self._take_memory()

    def _transitions(self) -> dict[str, Callable[[], Any]]:
        """Build what moves weights to generation; returns phase -> what happens in it on this rank."""
        host, rollout, joint, memory = self.host, self.host.spec.role(ROLLOUT), self.joint, self.mode.memory
        if joint is not None and ACTOR in host.roles:
            actor: Any = host.roles[ACTOR]
            self._phase("init", lambda: actor.join_transfer(joint.address))
            host.ledger.note("init")
            return {RESHARD: lambda: host.run(ACTOR, "send_weights", (0,), {})}
        if rollout is None:
            return {}

        def built() -> HybridEngine | RehearsedReceiver:
            if joint is not None:
                return RehearsedReceiver(rollout, host.rank, host.roles, joint.address)
            return rehearsed_engine(rollout, host.rank, host.roles, memory)

        engine = self._phase("init", built)
        host.ledger.note("init")

        def enter() -> None:
            with host.ledger.phase(RESHARD):
                engine.enter()
            if isinstance(engine, HybridEngine):  # as an engine would
                weights: Any = engine.weights
                self.mode.order.read(list(weights.tensors.values()))

        return {RESHARD: enter, LEAVE: engine.exit}

    @property
    def trained(self) -> list[RoleSpec]:
        """Roles with an update that is rehearsed."""
        return [role for role in self.host.spec.megatron_roles if role.is_trained]

    def _take_memory(self) -> dict[str, PhaseMemory]:
        return self.host.ledger.take()

    def _update(self, role: RoleSpec, prefix: str = "", shares: tuple[float, ...] = (1.0,)) -> None:
        spec = role.update
        assert spec is not None
        batch = self._batch(role, spec, self.config.batch_sizes.mini_batch_samples(role.settings), shares)
        options = {"num_prompts": len(batch)} if spec.call.compares else {}
        self._call(role, prefix + spec.phase, spec.call.method, batch, **options)

    def _batch(self, role: RoleSpec, spec: PassSpec, num_samples: int, shares: tuple[float, ...] = (1.0,)) -> Batch:
        """Make up the columns that a pass reads."""
        vocab_size = vocabulary_of(role)
        num = num_rows(self.config, self.host.spec, spec, num_samples)
        if spec.call.compares:
            sizes = lengths_of(self.config, half_as_long(self.config, spec), max(1, num // ANSWERS), shares)
            return synthetic_pairs(sizes, vocab_size)
        read = COLUMNS.read_by(*spec.call.reads)
        taught = {name: value for name, value in of_teachers(self.config).items() if name in read}
        lengths = lengths_of(self.config, spec, num, shares)
        batch = synthetic_batch(lengths, vocab_size, spec.call.made_up, taught)
        if self.images is not None and "image_features" in read and reads_images(role, self.config):
            prompts = [prompt for prompt, _ in lengths]
            trained = PATCHES if PATCHES in read else POLICY_FEATURES
            column = trained if role.trains_tower else IMAGE_FEATURES
            add_images(batch, self.images, prompts, getattr(torch, role.megatron.dtype), column)
        return batch

    def _call(self, role: RoleSpec, phase: str, method: str, batch: Batch, **options: Any) -> None:
        self._phase(phase, lambda: self.host.run(role.name, method, (batch,), options))

    def _phase(self, name: str, body: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        self.mode.begin(name)
        answer = body()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        return answer

    def report(self) -> dict[str, Any]:
        """Return what the rank's file has, but for memory at peaks and the mode's own notes."""
        return {
            "pool": self.host.spec.name,
            "pp_rank": self.host.groups.grid.pp_rank(self.host.groups.rank),
            "seconds": self.seconds,
            "phases": {phase: {"peak": memory.peak, "owned": memory.owned} for phase, memory in self.taken.items()},
        }
