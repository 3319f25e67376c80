"""Everything that a run of a stage consists of, put together: data, pools and roles, life and books."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_rl.cluster.cluster import Cluster
from megatron_rl.cluster.signals import graceful_signals
from megatron_rl.config.roles import ACTOR, CRITIC, REFERENCE, Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.steps import with_steps
from megatron_rl.config.tasks import REWARD
from megatron_rl.controller.lifecycle import Lifecycle, StopPolicy
from megatron_rl.controller.placement import CallObserver, hosting_of, make_cluster, stop_grace_s
from megatron_rl.controller.run_folder import RunFolder
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.ledger.planner.batch_arithmetic import stage_table
from megatron_rl.ledger.planner.memory import planned_memory
from megatron_rl.observe.summary import layout_table
from megatron_rl.roles.environment import handed_on
from megatron_rl.roles.host import RankHost
from megatron_rl.roles.reference import Reference
from megatron_rl.tasks.held_out import HeldOut
from megatron_rl.tasks.stored_reference import StoredReference
from megatron_rl.tasks.task_data import TaskData

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class TaskRun:
    """What a loop works with. stored: the reference's log-probs, of dpo. started: of the monotonic clock."""

    config: RunConfig
    data: TaskData
    held_out: HeldOut
    life: Lifecycle
    logger: RunLogger
    folder: RunFolder
    cluster: Cluster = field(repr=False)
    hosts: dict[str, RankHost]
    stored: StoredReference
    started: float

    @property
    def name(self) -> str:
        """Of the role that is trained."""
        return CRITIC if self.config.trainer.stage == REWARD else ACTOR

    def role(self, kind: type[Kind]) -> Kind:
        """The handle of the role that is trained."""
        return self._handle(self.name, kind)

    @property
    def reference(self) -> Reference | None:
        """The handle of the frozen policy, where every batch is scored with it."""
        return self._handle(REFERENCE, Reference) if REFERENCE in Placement.of(self.config).roles else None

    def _handle(self, name: str, kind: type[Kind]) -> Kind:
        placement = Placement.of(self.config)
        return self.cluster.pools[placement.roles[name].pool].handle(name, kind)

    def describe(self, num_tokens: int) -> dict[str, float]:
        """Seconds and memory of the step that ends, in which so many tokens were read."""
        memory = {pool: host.take_memory() for pool, host in self.hosts.items()}
        found = self.logger.time_metrics(num_tokens)
        return found | self.logger.memory_metrics({pool: future.get() for pool, future in memory.items()})


@contextmanager
def open_stage(config: RunConfig, local: bool = False) -> Iterator[TaskRun]:
    """A stage, ready for its first step; errors of data and checkpoints come before any process is started."""
    started, trainer = time.monotonic(), config.trainer
    with graceful_signals(stop_grace_s(trainer)) as stop, ExitStack() as opened:
        placement = Placement.of(config)
        tokenizer = load_tokenizer(placement.leader.model_path)
        data = TaskData(config, tokenizer)
        config = with_steps(config, len(data.train))
        folder = RunFolder(config)
        logger = RunLogger(config, folder, tokenizer, planned_memory(config))
        opened.enter_context(folder)
        opened.enter_context(logger)
        held_out = HeldOut(config, logger, stop)
        parts = (data, held_out, logger)
        for part in parts:
            folder.give_back(part.load_state_dict)
        logger.console.print(layout_table(stage_table(config)))
        for note in (*data.notes, *(f"skipped {reason}" for reason in folder.start.skipped)):
            logger.say(note)
        if handed := handed_on():
            logger.say(f"every rank gets {', '.join(f'{name}={value}' for name, value in handed.items())}")
        stop_policy = StopPolicy(stop)
        cluster = opened.enter_context(
            make_cluster(placement, hosting_of(config, placement, CallObserver(stop_policy, logger)), local)
        )
        hosts = build(cluster, placement, logger)
        stored = StoredReference(folder.start.path)
        life = Lifecycle(config, folder, hosts, parts, logger, stop_policy, stored, held_out.step_to_keep)
        life.restore()
        with life:
            yield TaskRun(config, data, held_out, life, logger, folder, cluster, hosts, stored, started)


def build(cluster: Cluster, placement: Placement, logger: RunLogger) -> dict[str, RankHost]:
    """Every role on its pool; returns the handles of the pools' hosts."""
    hosts = {name: pool.host(RankHost) for name, pool in cluster.pools.items()}
    building = [(role.name, hosts[role.pool].build(role.name)) for role in placement.roles.values()]
    for name, future in building:
        with logger.clock.waiting(f"build {name}"):
            future.get()
    return hosts
