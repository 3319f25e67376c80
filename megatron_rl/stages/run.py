"""Everything that a run of a stage consists of, put together: data, pools and roles, life and books."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_rl.book import Book
from megatron_rl.cluster.cluster import Cluster
from megatron_rl.cluster.signals import graceful_signals
from megatron_rl.config.roles import ACTOR, CRITIC, REFERENCE, Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.stages import REWARD
from megatron_rl.config.steps import with_steps
from megatron_rl.hosting import Ears, hosting_of, make_cluster, stop_grace_s
from megatron_rl.lifecycle import Lifecycle, Pace
from megatron_rl.observe.summary import layout_table
from megatron_rl.planner.batch_arithmetic import stage_table
from megatron_rl.planner.memory import planned_memory
from megatron_rl.prompts.tokenizer import load_tokenizer
from megatron_rl.roles.environment import handed_on
from megatron_rl.roles.host import RankHost
from megatron_rl.roles.reference import Reference
from megatron_rl.run_folder import RunFolder
from megatron_rl.stages.data import StageData
from megatron_rl.stages.held_out import HeldOut
from megatron_rl.stages.stored import StoredReference

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class StageRun:
    """What a loop works with. stored: the reference's log-probs, of dpo. started: of the monotonic clock."""

    config: RunConfig
    data: StageData
    held_out: HeldOut
    life: Lifecycle
    book: Book
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
        found = self.book.time_metrics(num_tokens)
        return found | self.book.memory_metrics({pool: future.get() for pool, future in memory.items()})


@contextmanager
def open_stage(config: RunConfig, local: bool = False) -> Iterator[StageRun]:
    """A stage, ready for its first step; errors of data and checkpoints come before any process is started."""
    started, trainer = time.monotonic(), config.trainer
    with graceful_signals(stop_grace_s(trainer)) as stop, ExitStack() as opened:
        placement = Placement.of(config)
        tokenizer = load_tokenizer(placement.leader.model_path)
        data = StageData(config, tokenizer)
        config = with_steps(config, len(data.train))
        folder = RunFolder(config)
        book = Book(config, folder, tokenizer, planned_memory(config))
        opened.enter_context(folder)
        opened.enter_context(book)
        held_out = HeldOut(config, book, stop)
        parts = (data, held_out, book)
        for part in parts:
            folder.give_back(part.load_state_dict)
        book.console.print(layout_table(stage_table(config)))
        for note in (*data.notes, *(f"skipped {reason}" for reason in folder.start.skipped)):
            book.say(note)
        if handed := handed_on():
            book.say(f"every rank gets {', '.join(f'{name}={value}' for name, value in handed.items())}")
        pace = Pace(stop)
        cluster = opened.enter_context(make_cluster(placement, hosting_of(config, placement, Ears(pace, book)), local))
        hosts = build(cluster, placement, book)
        stored = StoredReference(folder.start.path)
        life = Lifecycle(config, folder, hosts, parts, book, pace, stored, held_out.step_to_keep)
        life.restore()
        with life:
            yield StageRun(config, data, held_out, life, book, folder, cluster, hosts, stored, started)


def build(cluster: Cluster, placement: Placement, book: Book) -> dict[str, RankHost]:
    """Every role on its pool; returns the handles of the pools' hosts."""
    hosts = {name: pool.host(RankHost) for name, pool in cluster.pools.items()}
    building = [(role.name, hosts[role.pool].build(role.name)) for role in placement.roles.values()]
    for name, future in building:
        with book.clock.waiting(f"build {name}"):
            future.get()
    return hosts
