"""Which roles may share a pool: set partitions without those that kept values rule out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_rl.config.roles import ACTOR, ROLLOUT
from megatron_rl.config.trainer import GLOBAL_POOL
from megatron_rl.planning.layout_search.search_problem import SearchProblem

Block = tuple[str, ...]
HYBRID = "actor_rollout_ref.hybrid_engine"


def partitions(names: Sequence[str]) -> Iterator[tuple[Block, ...]]:
    """Yield every set partition once; blocks and their names keep the given order."""
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    for number in range(1 << len(rest)):
        inside = tuple(name for place, name in enumerate(rest) if number >> place & 1)
        outside = [name for name in rest if name not in inside]
        for others in partitions(outside):
            yield ((first, *inside), *others)


class PoolNames:
    """Names and sizes of pools by their roles, and whether kept values allow them."""

    def __init__(self, work: SearchProblem) -> None:
        self.work = work
        specs = {name: role.spec for name, role in work.roles.items()} | {ROLLOUT: work.rollout}
        self.keys = {name: spec.key for name, spec in specs.items()}
        kept = work.keeps.pools
        self.kept = {name: kept[key] for name, key in self.keys.items() if key in kept}

    def name(self, block: Block) -> str:
        """Return the name of a pool: global_pool with the actor, else a kept name, else that of its first role."""
        if ACTOR in block:
            return GLOBAL_POOL
        return next((self.kept[role] for role in block if role in self.kept), block[0])

    def allows(self, partition: Sequence[Block]) -> bool:
        """Return whether a partition agrees with every kept pool and a kept hybrid_engine."""
        names = [self.name(block) for block in partition]
        if len(set(names)) < len(names):
            return False
        owners = {name: role.spec.model_of for name, role in self.work.roles.items() if role.spec.model_of is not None}
        if any(name in block and owner not in block for block in partition for name, owner in owners.items()):
            return False
        together = any(ACTOR in block and ROLLOUT in block for block in partition)
        if self.work.keeps.values.get(HYBRID) in (True, False) and self.work.keeps.values[HYBRID] != together:
            return False
        return all(
            self.kept[role] == name
            for block, name in zip(partition, names, strict=True)
            for role in block
            if role in self.kept
        )

    def sizes(self, block: Block) -> list[int]:
        """Return the sizes in units that a pool of these roles may have."""
        return [units for units in self.work.cluster.sizes if self.work.keeps.allow(self.size_settings(block, units))]

    def size_settings(self, block: Block, units: int) -> dict[str, int]:
        """Return the settings (key -> value) of a pool's size."""
        shape, name = self.work.cluster.shape(units), self.name(block)
        group = "trainer" if name == GLOBAL_POOL else f"pools.{name}"
        return {f"{group}.nnodes": shape.num_nodes, f"{group}.n_gpus_per_node": shape.per_node}
