"""Rows, tables and JSON that the plans of all tasks share: pools, groups of ranks, memory, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from megatron_rl.config.roles import ACTOR
from megatron_rl.observe.summary import plain_table
from megatron_rl.planning.memory_report import MemoryReport
from megatron_rl.planning.run_models import PoolModels

SHOWN_GROUPS = 4
SHOWN_SIZES = ("TP", "PP", "DP")
"""Sizes that are shown even where they are 1."""


def amount(num_bytes: float) -> str:
    """Bytes in GB, or below 0.1 GB in MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def pools_table(pools: Iterable[PoolModels]) -> Table:
    """One row for each pool."""
    headings = ("pool", "nodes x ranks", "roles", "layout", "ranks")
    return plain_table("Pools of ranks", headings, [pool_row(pool) for pool in pools])


def groups_table(groups: Iterable[tuple[str, list[list[int]]]]) -> Table:
    """One row for each kind of group: name, number of groups, and the ranks of the first ones."""
    rows: list[Sequence[str]] = []
    for name, members in groups:
        shown = ", ".join(map(str, members[:SHOWN_GROUPS])) + (", ..." if len(members) > SHOWN_GROUPS else "")
        rows.append((name, str(len(members)), shown))
    return plain_table("Groups of ranks", ("group", "number", "ranks"), rows)


def memory_table(memory: MemoryReport, pool: str, where: str) -> Table:
    """Bytes of each phase, one column for each kind of stage of a pool. where: ` of POOL`, or nothing."""
    kinds = memory.kinds(pool)
    stages = list(kinds.values())
    rows = [(phase, *(amount(stage.total(phase)) for stage in stages)) for phase in stages[0].phases]
    headings = ("phase", *(f"{kind} stage" for kind in kinds))
    return plain_table(f"Memory per GPU{where}, of {usable_amount(memory)}", headings, rows)


def usable_amount(memory: MemoryReport) -> str:
    """The bytes that tensors may take, in words."""
    return f"the {amount(memory.usable)} that one {memory.hardware.name} has for tensors"


def pool_row(pool: PoolModels) -> tuple[str, ...]:
    """Return name, size, roles, layouts and ranks of a pool. Ranks are numbered from 0 in every pool."""
    size, grid = pool.spec.size, pool.grid
    layouts = []
    if pool.spec.megatron_roles:
        cp_size = grid.most_sharing or grid.cp_size
        context = "CP" if grid.most_sharing is None else "CP<="
        sizes = {"TP": grid.tp_size, context: cp_size, "PP": grid.pp_size, "VPP": pool.vpp_size}
        sizes |= {"EP": grid.ep_size, "DP": grid.num_replicas // cp_size}
        layouts.append(" ".join(f"{name}{value}" for name, value in sizes.items() if value > 1 or name in SHOWN_SIZES))
    if pool.rollout is not None:
        layouts.append(f"rollout TP{pool.rollout.tp_size} x {pool.rollout.num_replicas}")
    return (
        pool.spec.name,
        f"{size.num_nodes} x {size.num_ranks_per_node}",
        ", ".join(role.name for role in pool.spec.roles),
        ", ".join(layouts),
        "0" if size.world_size == 1 else f"0-{size.world_size - 1}",
    )


def pool_as_json(pool: PoolModels) -> dict[str, Any]:
    """Return sizes, roles, ranks and groups of a pool as data."""
    size, grid = pool.spec.size, pool.grid
    content: dict[str, Any] = {
        "nnodes": size.num_nodes,
        "n_gpus_per_node": size.num_ranks_per_node,
        "ranks": list(range(size.world_size)),
        "roles": [role.name for role in pool.spec.roles],
        "groups": pool_groups(pool),
    }
    if pool.spec.megatron_roles:
        cp_size = grid.most_sharing or grid.cp_size
        sizes = {"tp": grid.tp_size, "pp": grid.pp_size, "vpp": pool.vpp_size, "cp": cp_size}
        sizes |= {"dp": grid.num_replicas // cp_size}
        content |= sizes | {"ep": grid.ep_size, "etp": grid.expert_tp_size}
    if pool.rollout is not None:
        content |= {"rollout_tp": pool.rollout.tp_size, "rollout_replicas": pool.rollout.num_replicas}
    return content


def pool_groups(pool: PoolModels) -> dict[str, list[list[int]]]:
    """Return name -> ranks of each group, of the grids that a pool uses."""
    grid, rollout, groups = pool.grid, pool.rollout, {}
    if pool.spec.megatron_roles:
        dp_groups = grid.dp_groups() if grid.most_sharing is None else grid.cp_groups()
        groups = {"training TP": grid.tp_groups(), "training PP": grid.pp_groups(), "training DP": dp_groups}
        if grid.most_sharing is not None:
            groups |= {f"training CP{size}": grid.pack_groups(size) for size in grid.pack_sizes if size > 1}
        elif grid.cp_size > 1:
            groups["training CP"] = grid.cp_groups()
    if rollout is not None:
        groups["rollout TP"] = rollout.tp_groups()
    if rollout is not None and pool.spec.role(ACTOR) is not None:
        groups["micro-DP"] = rollout.micro_dp_groups()
    return groups
