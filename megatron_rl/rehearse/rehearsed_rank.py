"""One rank: its roles are built, and run the passes of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_rl.columns import ACTOR_UPDATE, COLUMNS, CRITIC_UPDATE
from megatron_rl.config.roles import ACTOR, CRITIC, REFERENCE, REWARD_MODEL, PassSpec, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.observe.memory_ledger import PhaseMemory
from megatron_rl.records import Batch
from megatron_rl.rehearse.dispatch_mode import RehearsalMode
from megatron_rl.rehearse.made_up_batches import UNEVEN, lengths_of, made_up, num_rows
from megatron_rl.roles.environment import RankEnvironment
from megatron_rl.roles.host import RankHost
from third_party_patches import apply_patches

SCORES = {ACTOR: "log_probs", REFERENCE: "log_probs", CRITIC: "values", REWARD_MODEL: "scores"}
"""Kind of role -> the method of its scoring pass."""
UPDATE = {ACTOR: ACTOR_UPDATE, CRITIC: CRITIC_UPDATE}
"""Kind of role -> the reader of the columns of its update."""
MADE_UP = ("old_log_probs", "ref_log_probs", "advantages", "old_values", "returns")
"""Columns that updates are given, where they read them."""
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

    seconds: phase -> how long its rehearsal took. num_blocks: phase -> micro-batches.
    """

    def __init__(self, config: RunConfig, pool: str, environment: RankEnvironment, mode: RehearsalMode) -> None:
        self.config, self.mode = config, mode
        self.seconds: dict[str, float] = {}
        self.num_blocks: dict[str, int] = {}
        self.host: RehearsedHost = self._phase(
            "start", lambda: RehearsedHost(config, pool=pool, environment=environment)
        )

    def run(self) -> None:
        """Build the roles; update each once, for Adam's moments; then score and update, which is what is measured."""
        roles = self.host.spec.megatron_roles
        for role in roles:
            self._phase("init", lambda role=role: self.host.build(role.name))  # type: ignore[misc]
        trained = [role for role in roles if role.update is not None and role.kind in UPDATE]
        for role in trained:
            self._update(role, WARM_UP, UNEVEN)
        self.taken = {"init": self._take_memory()["init"]}
        for role in roles:
            if role.score is not None and role.kind in SCORES:
                self._score(role, role.score)
        for role in trained:
            self._update(role)
        self.taken |= self._take_memory()

    def _take_memory(self) -> dict[str, PhaseMemory]:
        return self.host.ledger.take()

    def _score(self, role: RoleSpec, spec: PassSpec) -> None:
        batch = self._batch(spec, self.config.batch_sizes.num_samples, ())
        self._phase(spec.phase, lambda: self.host.run(role.name, SCORES[role.kind], (batch,), {}))

    def _update(self, role: RoleSpec, prefix: str = "", shares: tuple[float, ...] = (1.0,)) -> None:
        spec = role.update
        assert spec is not None
        wanted = [name for name in COLUMNS.read_by(UPDATE[role.kind]) if name in MADE_UP]
        num_samples = self.config.batch_sizes.mini_batch_samples(role.settings)
        batch = self._batch(spec, num_samples, wanted, shares)
        self._phase(prefix + spec.phase, lambda: self.host.run(role.name, "update", (batch,), {}))

    def _batch(self, spec: PassSpec, num_samples: int, columns: Any, shares: tuple[float, ...] = (1.0,)) -> Batch:
        num = num_rows(self.config, self.host.spec, spec, num_samples)
        return made_up(lengths_of(self.config, num, shares), columns)

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
