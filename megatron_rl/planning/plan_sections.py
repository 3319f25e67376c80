"""The sections of a plan: rows of the screen, tables, JSON and notes of one thing each. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from megatron_rl.config.keys import ROLLOUT as ROLLOUT_KEY
from megatron_rl.config.roles import ACTOR, Placement, elastic_pools
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.model.families import tensors_of
from megatron_rl.observe.summary import layout_table, plain_table
from megatron_rl.planning.async_estimate import AsyncEstimate
from megatron_rl.planning.batch_arithmetic import batch_rows
from megatron_rl.planning.delta_memory import sends_deltas, sent_last
from megatron_rl.planning.fitting_changes import FittingChanges, changes_as_json
from megatron_rl.planning.follower_transfers import follower_transfers
from megatron_rl.planning.image_costs import ImageCosts
from megatron_rl.planning.memory_report import GenerationMemory, LongestSequence, MemoryReport, amount
from megatron_rl.planning.run_models import PoolModels, RunModels, host_copy_bytes
from megatron_rl.planning.transition import TransitionPlan

Row = tuple[str, object, str]
"""Name, value, and how it comes about."""
FEW_COLUMNS = 128
"""Columns of an expert on a rank below which the plan names expert parallelism."""
LARGEST = 3
"""Tensors of the worst rank that the screen names."""
ON_SCREEN = ("responses per prompt", "samples per step", "examples per step", "micro-batches per rank")
"""Rows of the batch that are asked first."""
SHOWN_GROUPS = 4
SHOWN_SIZES = ("TP", "PP", "DP")
"""Sizes that are shown even where they are 1."""


@dataclass(frozen=True)
class Section:
    """One part of a plan.

    rows: what is asked first. tables: everything. json: key of the plan -> data; sections may share a key whose value
    is a dictionary. notes: sentences to print after the tables.
    """

    rows: Sequence[Row] = ()
    tables: Sequence[Table] = ()
    json: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


def batch_section(config: RunConfig, notes: Sequence[str] = ()) -> Section:
    """Return layout and batch, of all tasks; one that does not generate is named."""
    rows = batch_rows(config)
    stage = {} if config.generates else {"stage": config.trainer.stage}
    return Section(
        [row for row in rows if row[0] in ON_SCREEN],
        [layout_table(rows)],
        stage | {"batch": {name: value for name, value, _ in rows}},
        notes,
    )


def pool_section(models: RunModels) -> Section:
    """Return pools, their layouts, and groups of ranks. With several pools a group's name begins with the pool's."""
    pools = models.pools
    groups = {
        f"{pool} {name}" if len(pools) > 1 else name: ranks
        for pool, of_pool in pools.items()
        for name, ranks in pool_groups(of_pool).items()
    }
    rows: list[Row] = []
    for pool in pools.values():
        name, _, roles, layout, _ = pool_row(pool)
        size = pool.spec.size
        ranks = f"{size.world_size} rank{'s' * (size.world_size > 1)}"
        nodes = f" on {size.num_nodes} nodes" if size.num_nodes > 1 else ""
        rows.append(("layout" if len(pools) == 1 else f"layout of {name}", ranks + nodes, f"{layout}; {roles}"))
    shown: list[Sequence[str]] = []
    for name, of_kind in groups.items():
        first = ", ".join(map(str, of_kind[:SHOWN_GROUPS])) + (", ..." if len(of_kind) > SHOWN_GROUPS else "")
        shown.append((name, str(len(of_kind)), first))
    headings = ("pool", "nodes x ranks", "roles", "layout", "ranks")
    tables = [
        plain_table("Pools of ranks", headings, map(pool_row, pools.values())),
        plain_table("Groups of ranks", ("group", "number", "ranks"), shown),
    ]
    json = {"pools": {name: pool_as_json(pool) for name, pool in pools.items()}}
    return Section(rows, tables, json | ({"groups": groups} if models.placement.generates else {}))


def memory_section(memory: MemoryReport, fitting: FittingChanges | None) -> Section:
    """Return the memory of the worst rank, and of each kind of stage."""
    worst = memory.worst
    where = f"{worst.kind} stage{memory.where(worst.pool)}, phase {worst.worst_phase}"
    held = ", ".join(f"{name} {amount(size)}" for name, size in memory.largest_moment()[:LARGEST])
    tables = []
    for pool in memory.pools:
        kinds = memory.kinds(pool)
        stages = list(kinds.values())
        rows = [(phase, *(amount(stage.total(phase)) for stage in stages)) for phase in stages[0].phases]
        title = f"Memory per GPU{memory.where(pool)}, of {memory.usable_text}"
        tables.append(plain_table(title, ("phase", *(f"{kind} stage" for kind in kinds)), rows))
    return Section(
        [
            ("fits into memory", "yes" if memory.fits else "NO", f"of {memory.usable_text}"),
            ("worst rank", amount(memory.peak), f"{where}: {held}"),
        ],
        tables,
        {"memory": memory.as_json() | {"changes": changes_as_json(fitting)}},
    )


def image_section(images: ImageCosts | None, num_readers: int, *, is_trained: bool) -> Section:
    """Return the images of a step, the tower, and their features; nothing where prompts are text.

    num_readers: data-parallel ranks, each of which reads its share. is_trained: the tower is, in the first stage.
    """
    if images is None:
        return Section()
    tower, assumed = images.form.tower, "assumed: one in each prompt, all new"
    sizes = f"{images.num_tokens} tokens ({images.num_patches} patches) each; {assumed}"
    stage = "first" if is_trained else "last"
    flops = f"{images.flops / 1e12:.4g} TFLOPs a step, on {num_readers} rank(s) of the {stage} stage"
    if is_trained:
        flops += ", and in the update"
    kept = f"{amount(images.feature_bytes)}"
    rows: list[Row] = [
        ("images", f"{images.num_images}", f"a step, {sizes}"),
        ("vision tower", amount(tower.num_params * images.element), f"{tower.num_params:,} parameters; {flops}"),
        ("features", kept, f"a step, in shared memory of the machines; {tower.feature_columns} numbers a token"),
        ("patches", amount(images.patch_bytes), f"a step, to the tower; {images.form.patch_values} numbers each"),
    ]
    json = {
        "num_images": images.num_images,
        "tokens": images.num_tokens,
        "most_tokens": images.most_tokens,
        "patches": images.num_patches,
        "tower_params": tower.num_params,
        "tower_bytes": tower.num_params * images.element,
        "flops": images.flops,
        "feature_bytes": images.feature_bytes,
        "patch_bytes": images.patch_bytes,
        "readers": num_readers,
        "calls": images.rounds(num_readers),
    }
    return Section(rows[:1], [layout_table(rows, "Images")], {"images": json})


def cache_section(memory: GenerationMemory, longest: LongestSequence) -> Section:
    """Return what generation has room for, with the largest moment."""
    stage = memory.worst
    title = f"{stage.worst_phase} on the {stage.kind} stage{memory.where(stage.pool)}"
    held = [(f"  {name}", amount(size)) for name, size in memory.largest_moment() if size]
    most = memory.kv_cache.num_tokens(memory.room_kv_bytes)
    rows: list[Row] = [
        ("KV cache", amount(memory.kv_bytes), "rollout.kv_cache_memory_bytes, on each rank"),
        ("KV tokens", f"{memory.kv_tokens}", f"{memory.kv_cache.bytes_per_token} bytes a token and rank"),
        ("sequences at once", f"{memory.kv_sequences}", f"with {memory.longest} tokens each, the longest"),
        ("largest KV cache", amount(memory.room_kv_bytes), f"that fits in every phase: {most} tokens"),
        ("longest sequence", f"{longest.tokens}", f"tokens, as limited by {longest.limited_by}"),
    ]
    cache = f"{memory.kv_sequences} sequences of {memory.longest} tokens at once"
    return Section(
        [("KV cache", amount(memory.kv_bytes), f"{cache}; at most {amount(memory.room_kv_bytes)} fit")],
        [
            plain_table("Largest moment", ("what", "held"), [(title, amount(stage.peak)), *held]),
            layout_table(rows, "Room for generation"),
        ],
        {"memory": {"longest_sequence": asdict(longest)}},
    )


def async_section(ahead: AsyncEstimate) -> Section:
    """Return asynchronous training: both sides, and which one waits."""
    table = layout_table(ahead.rows(), "Asynchronous training, simulated")
    return Section(tables=[table], json={"ahead": ahead.as_json()}, notes=[ahead.advice])


def transfer_section(plan: TransitionPlan, trainer: TrainerConfig) -> Section:
    """Return the weights that generation receives."""
    moved = amount(plan.mean_network + plan.mean_link)
    json = {
        "network_bytes_per_rank": list(plan.network),
        "link_bytes_per_rank": list(plan.link),
        "model_bytes": plan.model_bytes,
        "closed_form_bytes": plan.lower_bound,
        "sent_bytes_per_rank": None if plan.sent is None else list(plan.sent),
        "once_bytes_per_rank": None if plan.once is None else plan.once.received,
    }
    return Section(
        [] if trainer.val_only else [("weight transfer", moved, "a step, to a rank that generates")],
        [layout_table(transition_rows(plan), "Transition to rollout mode, per GPU")],
        {"transition": json},
    )


def follower_section(models: RunModels) -> Section:
    """Return the weights for roles of other pools that follow the policy."""
    transfers, rows = follower_transfers(models), list[Row]()
    for transfer in transfers:
        when = "a step" if transfer.follows.every == 1 else f"every {transfer.follows.every} steps"
        note = f"{when}, to a rank of {transfer.role.pool}"
        rows.append((f"weights for {transfer.role.name}", amount(max(transfer.received)), note))
    is_shown = transfers and models.placement.generates
    return Section(rows, json={"followers": [one.as_json() for one in transfers]} if is_shown else {})


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
        attention_dp = f" DP{pool.rollout.dp_size}" * (pool.rollout.dp_size > 1)
        layouts.append(f"rollout TP{pool.rollout.tp_size}{attention_dp} x {pool.rollout.num_replicas}")
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
        content |= {"rollout_ep": pool.rollout.ep_size} if pool.rollout.ep_size > 1 else {}
        content |= {"rollout_dp": pool.rollout.dp_size} if pool.rollout.dp_size > 1 else {}
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


def transition_rows(plan: TransitionPlan) -> list[Row]:
    """Return rows (what, bytes, how they come about)."""

    def span(sizes: Sequence[int]) -> str:
        return f"{amount(min(sizes))} to {amount(max(sizes))}"

    once: list[Row] = []
    if plan.once is not None:
        sizes = plan.once.received
        note = f"mean; {span(sizes)}; the base, before the first step; the rest is of adapters, and of every step"
        once = [("once in a run", amount(statistics.fmean(sizes)), note)]
    if plan.sent is None:
        formula = f"{plan.formula}, M cut evenly"
        return [
            *once,
            ("over the network", amount(plan.mean_network), f"mean; {span(plan.network)}"),
            ("inside its node", amount(plan.mean_link), f"mean; {span(plan.link)}"),
            ("closed form", amount(plan.lower_bound), f"{formula}, M = {amount(plan.model_bytes)}"),
        ]
    return [
        *once,
        (
            "received by a rollout rank",
            amount(plan.mean_network),
            f"mean; {span(plan.network)}; over the network, as pools are taken to have machines of their own",
        ),
        ("sent by a training rank", amount(max(plan.sent)), "at most; replicas pass received weights on"),
        ("sent by all", amount(sum(plan.sent)), "M, every byte of the model once"),
        ("closed form", amount(plan.lower_bound), "M / rollout TP, M cut evenly"),
    ]


def base_notes(models: RunModels) -> list[str]:
    """Return a sentence about host memory for a frozen base; none where it stays on the device, or comes again."""
    copied = max(host_copy_bytes(models, pp_rank) for pp_rank in range(models.grid.pp_size))
    if not copied or models.config.trainer.device == "cpu":  # there the table has it
        return []
    num_ranks = models.training.spec.size.num_ranks_per_node
    return [
        f"lora.base=host: {amount(copied)} of pinned host memory at most on each rank, {amount(copied * num_ranks)} a "
        "node, for frozen weights of other stages"
    ]


def expert_notes(models: RunModels) -> list[str]:
    """Return a sentence about expert parallelism in generation where TP leaves few columns of experts to a rank."""
    tp_size, ep_size = models.rollout.tp_size, models.rollout.ep_size
    experts = [tensor for tensor in tensors_of(models.actor.specs).values() if tensor.is_expert]
    cut = next(((tensor, tensor.tp_dim) for tensor in experts if tensor.tp_dim is not None), None)
    if cut is None or ep_size > 1:
        return []
    num_experts, columns = cut[0].segments[0].shape[0], cut[0].segments[0].shape[cut[1]]
    if columns // tp_size >= FEW_COLUMNS or num_experts % tp_size:
        return []
    return [
        f"{ROLLOUT_KEY}.tensor_model_parallel_size={tp_size} leaves {columns // tp_size} of the {columns} columns of "
        f"every expert to a rank that generates; {ROLLOUT_KEY}.expert_parallel_size={tp_size} gives it "
        f"{num_experts // tp_size} of the {num_experts} experts whole, in as many bytes"
    ]


def elastic_notes(config: RunConfig) -> list[str]:
    """Return a sentence about every pool whose replicas come and go."""
    pools = Placement.of(config).pools
    return [
        f"{pool.min_replicas} to {pool.max_replicas} replicas of {pool.replica.world_size} rank(s) in {name}: they "
        f"come and go, and this plan counts with {pools[name].world_size // pool.replica.world_size}"
        for name, pool in elastic_pools(config).items()
    ]


def delta_notes(models: RunModels) -> list[str]:
    """Return a sentence about what `rollout.weight_deltas` keeps; none where all weights are sent."""
    if not sends_deltas(models):
        return []
    kept = max(sum(sent_last(models, pp_rank).values()) for pp_rank in range(models.grid.pp_size))
    note = (
        f"rollout.weight_deltas: training ranks keep what they sent last, {amount(kept)} at most on each; the "
        "resharding above is that of all weights, as in the first transfer and after a change of replicas"
    )
    if models.element > 2:
        note += f"; nearly all weights of {models.megatron.dtype} change in a step, those of bfloat16 do not"
    return [note]


def turn_notes(config: RunConfig) -> list[str]:
    """Return a sentence where the seconds for which samples wait are not planned."""
    if not config.has_turns or config.actor_rollout_ref.rollout.multi_turn.planned_wait_s:
        return []
    return ["seconds that environments and tools take are not in the plan: set multi_turn.planned_wait_s"]
