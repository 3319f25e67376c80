"""The best layouts of one pool: for each set of roles and number of ranks the Pareto front of layouts.

The objectives are seconds of scores, of updates, of generation and of the resharding. A step takes the longest scores
and the longest updates of all pools, plus generation and resharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from megatron_rl.config.role_kinds import PARAM_OFFLOAD, RoleKind
from megatron_rl.config.roles import ACTOR, ROLLOUT
from megatron_rl.planning.layout_search.grids import Grid, GridShape, Room, grids
from megatron_rl.planning.layout_search.role_on_layout import Option, RoleOnLayout
from megatron_rl.planning.layout_search.search_problem import (
    LEVELS,
    SearchProblem,
    engine_memory,
    expert_cut,
    rollout_sizes,
)
from megatron_rl.planning.layout_search.transition_seconds import (
    ActorBytes,
    image_seconds,
    in_place_seconds,
    received_seconds,
    rollout_shard,
    sent_seconds,
)
from megatron_rl.planning.role_ledger import SCORE, UPDATE, StageHeld
from megatron_rl.planning.step_time import dispatch_seconds

MOST_CUT = 512
"""Up to this many GPUs CP is tried for every layout; above, only where passes do not fit without it."""
PASSES, NO_WORK = (SCORE, UPDATE), (0.0, 0.0)
"""Kinds of passes; `PoolChoice.work` where ranks share no cores."""
DROP = "actor_rollout_ref.rollout.drop_train_weights"
"""A key whose values are not searched, but may be kept."""


@dataclass(frozen=True)
class Generation:
    """How a pool generates. seconds: of a batch, without the resharding. steady: of a batch when running ahead.

    offloaded: the entry of `LEVELS`. offload: seconds of moving that to the host and back.
    """

    tp: int
    kv_bytes: int
    seconds: float
    steady: float
    offloaded: tuple[str, ...]
    offload: float


@dataclass(frozen=True)
class PoolChoice:
    """One layout of a pool. options: role -> kind of pass -> how it is cut into micro-batches.

    score, update, gen, reshard: seconds. Between two pools reshard is this pool's side of the resharding; that of the
    actor's pool includes the passes over images.
    """

    block: tuple[str, ...]
    units: int
    shape: GridShape
    grid: Grid | None
    options: dict[str, dict[str, Option]] = field(compare=False)
    generation: Generation | None
    score: float
    update: float
    gen: float
    reshard: float

    @cached_property
    def work(self) -> tuple[float, float]:
        """Rank-seconds of scores and of updates where ranks share cores, else 0."""
        total = {"score": 0.0, "update": 0.0}
        for options in self.options.values():
            for kind, option in options.items():
                total[kind] += option.work
        return (total["score"], total["update"])

    @cached_property
    def vector(self) -> tuple[float, ...]:
        """The objectives of the Pareto front."""
        return (self.score, self.update, self.gen, self.reshard, *self.work)


class Pools:
    """Layouts of every set of roles, computed when first needed and cached."""

    def __init__(self, work: SearchProblem) -> None:
        self.work = work
        self.actor_bytes, self.adapter_bytes = ActorBytes.of(work.actor), ActorBytes.of_adapters(work.actor)
        self.num_layouts = 0
        self._fronts: dict[tuple[tuple[str, ...], int], list[PoolChoice]] = {}
        self._on_grid: dict[tuple[int, Grid, GridShape], RoleOnLayout] = {}
        self._grids: dict[tuple[tuple[str, ...], GridShape], list[Grid]] = {}
        self._same: dict[Grid, Grid] = {}

    def front(self, block: tuple[str, ...], units: int) -> list[PoolChoice]:
        """Return the Pareto front of the layouts of `block` on `units` units; empty where nothing fits."""
        key = (block, units)
        if key not in self._fronts:
            self._fronts[key] = self._made(block, units)
        return self._fronts[key]

    def _made(self, block: tuple[str, ...], units: int) -> list[PoolChoice]:
        """Compute the front: layouts without CP first, then those with CP that a lower bound does not rule out."""
        shape, names = self.work.cluster.shape(units), tuple(name for name in block if name in self.work.roles)
        if not names:
            return undominated(self.choices(block, units), [])
        kept: list[PoolChoice] = []
        whole: dict[Grid, list[PoolChoice]] = {}
        every = self.grids(names, shape)
        for grid in every:
            if grid.cp == 1:
                whole[grid] = list(self._on(block, units, grid))
                kept = undominated(whole[grid], kept)
        ways: dict[Grid, list[PoolChoice]] = {}
        for grid in every:
            if grid.cp == 1:
                continue
            base = replace(grid, cp=1)
            if base not in whole:  # kept values rule it out
                kept = undominated(self._on(block, units, grid), kept)
                continue
            if whole[base] and self.work.cluster.num_ranks > MOST_CUT:
                continue
            if base not in ways:
                ways[base] = self._ways(block, units, base, whole[base])
            if ways[base] and not self.work.hardware.is_measured and self._is_beaten(base, grid.cp, ways[base], kept):
                ways[base] = []  # and so are larger sizes, which come after it
            if ways[base]:
                kept = undominated(self._cut(block, units, grid, whole[base]), kept)
        return kept

    def _ways(self, block: tuple[str, ...], units: int, grid: Grid, uncut: list[PoolChoice]) -> list[PoolChoice]:
        """Return how `grid`, and every layout that adds CP to it, can generate and make its resharding.

        uncut: the choices of `grid`. Without any, or where a rollout's weights take room from passes, some passes may
        have been too large, so that every way to generate counts.
        """
        if uncut and not self._takes_room(block):
            return uncut
        shape = self.work.cluster.shape(units)
        roles = self._roles(block, grid, shape)
        if min(self._free(roles)) < 0:
            return []
        if ROLLOUT in block:
            return list(self._generating(block, units, grid, roles, {}, (0.0, 0.0), rollout_sizes(self.work, shape)))
        reshard = self._sent(grid, shape) if ACTOR in block else 0.0
        return [PoolChoice(block, units, shape, grid, {}, None, 0.0, 0.0, 0.0, reshard)]

    def _is_beaten(self, grid: Grid, cp: int, ways: Sequence[PoolChoice], kept: Sequence[PoolChoice]) -> bool:
        """Return whether layouts that add CP of `cp` or more to `grid` cannot enter the front, whichever way they
        generate.
        """
        roles = self._roles(ways[0].block, grid, ways[0].shape)
        score, update = (sum(role.least_cut(kind, cp) for role in roles if kind in role.kinds) for kind in PASSES)
        others = {(choice.gen, choice.reshard) for choice in ways}
        return all(any(beats(one.vector, (score, update, *other, *NO_WORK)) for one in kept) for other in others)

    def _cut(self, block: tuple[str, ...], units: int, grid: Grid, uncut: Sequence[PoolChoice]) -> Iterator[PoolChoice]:
        """Yield the choices of a layout with CP. uncut: those of the same layout without it, which generate equally."""
        if not uncut or self._takes_room(block):
            yield from self._on(block, units, grid)
            return
        self.num_layouts += 1
        roles = self._roles(block, grid, uncut[0].shape)
        options = self._fastest(roles, self._free(roles))
        if options is not None:
            score, update = seconds_of(options)
            for choice in uncut:
                yield replace(choice, grid=grid, options=options, score=score, update=update)

    def choices(self, block: tuple[str, ...], units: int) -> Iterator[PoolChoice]:
        """Yield every choice of every layout."""
        shape = self.work.cluster.shape(units)
        names = tuple(name for name in block if name in self.work.roles)
        if not names:
            yield from self._generating(block, units, None, [], {}, (0.0, 0.0), rollout_sizes(self.work, shape))
        for grid in self.grids(names, shape) if names else ():
            yield from self._on(block, units, grid)

    def _on(self, block: tuple[str, ...], units: int, grid: Grid) -> Iterator[PoolChoice]:
        shape = self.work.cluster.shape(units)
        self.num_layouts += 1
        roles = self._roles(block, grid, shape)
        sizes = rollout_sizes(self.work, shape) if ROLLOUT in block else [0]
        if not self._takes_room(block):
            yield from self._with_passes(block, units, grid, roles, self._free(roles), sizes)
            return
        for tp in sizes:  # the rollout's weights stay on the device together with the other roles
            stay = [self._own(tp)] * len(roles[0].held)
            if ACTOR in block:
                stay = [self._foreign_base(tp, grid, roles, number) for number in range(len(stay))]
            yield from self._with_passes(block, units, grid, roles, self._free(roles, stay), [tp])

    def _takes_room(self, block: tuple[str, ...]) -> bool:
        """Return whether weights of generation stay on the device while the pool trains."""
        return ROLLOUT in block and (ACTOR not in block or self.work.actor.spec.lora.base_stays)

    @cached_property
    def moved(self) -> ActorBytes:
        """What moves to generation in every step."""
        return self.adapter_bytes if self.work.keeps_base else self.actor_bytes.plus(self.adapter_bytes)

    def _sent(self, grid: Grid, shape: GridShape) -> float:
        """Return the seconds of passes over images, and of weights sent to a separate pool."""
        return sent_seconds(self.work, self.moved, grid, shape) + image_seconds(self.work, grid, shape)

    def _roles(self, block: tuple[str, ...], grid: Grid, shape: GridShape) -> list[RoleOnLayout]:
        """Return the roles of a pool on one layout, without the rollout."""
        return [self.on_grid(name, grid, shape, block) for name in block if name in self.work.roles]

    def _free(self, roles: Sequence[RoleOnLayout], taken: Sequence[int] = ()) -> list[int]:
        """Return the bytes of each sampled stage beside what the roles hold and `taken`; below 0: too large.

        taken: of each sampled stage; (): nothing.
        """
        stages = zip(*(role.held for role in roles), strict=True)
        free = [self.work.usable - sum(held.total for held in stage) for stage in stages]
        return [left - size for left, size in zip(free, taken or [0] * len(free), strict=True)]

    def _with_passes(
        self,
        block: tuple[str, ...],
        units: int,
        grid: Grid,
        roles: Sequence[RoleOnLayout],
        room: list[int],
        rollout_tps: Sequence[int],
    ) -> Iterator[PoolChoice]:
        """Yield the choices of one layout, with the fastest passes that fit. room: free bytes of each sampled stage."""
        shape = self.work.cluster.shape(units)
        if min(room) < 0:
            return
        options = self._fastest(roles, room)
        if options is None or not self._saves(roles, room):
            return
        score, update = seconds_of(options)
        if ROLLOUT in block:
            yield from self._generating(block, units, grid, roles, options, (score, update), rollout_tps)
            return
        reshard = 0.0
        if ACTOR in block:
            if min(room) < self._bucket:
                return
            reshard = self._sent(grid, shape)
        yield PoolChoice(block, units, shape, grid, options, None, score, update, 0.0, reshard)

    def _fastest(self, roles: Sequence[RoleOnLayout], room: list[int]) -> dict[str, dict[str, Option]] | None:
        """Return role -> kind of pass -> the fastest option that fits; None if a pass has none."""
        options: dict[str, dict[str, Option]] = {}
        for role in roles:
            picked = {kind: role.first_fit(kind, room) for kind in role.kinds}
            if any(option is None for option in picked.values()):
                return None
            options[role.role.name] = {kind: option for kind, option in picked.items() if option is not None}
        return options

    def grids(self, names: tuple[str, ...], shape: GridShape) -> list[Grid]:
        """Return the layouts that these roles can share; none where dtype or vocabulary padding differ."""
        key = (names, shape)
        if key not in self._grids:
            roles = [self.work.roles[name] for name in names]
            alike = {(role.spec.megatron.dtype, role.spec.megatron.make_vocab_size_divisible_by) for role in roles}
            layouts: list[Grid] = []
            if len(alike) == 1:
                models = tuple({role.sizes.path: role.sizes for role in roles}.values())
                sequence_parallel = roles[0].spec.megatron.sequence_parallel
                ways = ((role, role.spec.megatron.override_transformer_config.cp_comm_type) for role in roles)
                heads = tuple({role.sizes.num_attention_heads for role, way in ways if way == "a2a"})
                layouts = grids(Room(models, shape, sequence_parallel, heads))
            keeps = self.work.keeps
            for role in roles if keeps.values else ():
                layouts = [
                    grid
                    for grid in layouts
                    if keeps.allow({f"{role.group}.{name}": value for name, value in grid.settings.items()})
                ]
            self._grids[key] = [self._same.setdefault(grid, grid) for grid in layouts]
        return self._grids[key]

    def on_grid(self, name: str, grid: Grid, shape: GridShape, block: tuple[str, ...] = ()) -> RoleOnLayout:
        """Return one role on one layout. block: the roles of its pool."""
        role = self.work.role_in(name, block)
        key = (id(role), grid, shape)  # roles live as long as the work
        if key not in self._on_grid:
            self._on_grid[key] = RoleOnLayout(self.work, role, grid, shape)
        return self._on_grid[key]

    @cached_property
    def _bucket(self) -> int:
        return self.work.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes << 20

    def _saves(self, roles: Sequence[RoleOnLayout], room: Sequence[int]) -> bool:
        """Return whether the copies of a checkpoint save fit. Only on CPUs they are in the memory of the ranks."""
        if self.work.device != "cpu":
            return True
        copied = (sum(role.ledger.checkpoint_copy(pp_rank) for role in roles) for pp_rank in roles[0].stages)
        return all(size <= free for size, free in zip(copied, room, strict=True))

    # Pools that generate

    def _generating(
        self,
        block: tuple[str, ...],
        units: int,
        grid: Grid | None,
        roles: Sequence[RoleOnLayout],
        options: dict[str, dict[str, Option]],
        training: tuple[float, float],
        rollout_tps: Sequence[int],
    ) -> Iterator[PoolChoice]:
        """Yield every way to generate. training: seconds of the pool's scores and updates."""
        in_place, shape = ACTOR in block, self.work.cluster.shape(units)
        for tp in rollout_tps:
            if not self.work.keeps.allow({"actor_rollout_ref.rollout.tensor_model_parallel_size": tp}):
                continue
            if in_place and grid is not None and grid.tp % tp and tp % grid.tp:
                continue
            if self.work.keeps.values.get(DROP) and not (in_place and grid and not grid.tp % tp | grid.expert_tp % tp):
                continue
            for generation in self._generations(tp, shape, grid, roles, in_place):
                if in_place and grid is not None:
                    reshard = in_place_seconds(self.work, self.moved, grid, shape, tp)
                    reshard += image_seconds(self.work, grid, shape)
                else:
                    kept = self._base_shards[tp] if self.work.keeps_base else 0
                    reshard = received_seconds(self.work, self.shard(tp) - kept)
                gen = generation.seconds + generation.offload
                gen += dispatch_seconds(shape.num_nodes, shape.per_node, self.work.hardware)
                yield PoolChoice(block, units, shape, grid, options, generation, *training, gen, reshard)

    def shard(self, tp: int) -> int:
        """Return the bytes of the policy on each rank of a rollout, with its adapters."""
        return self._base_shards[tp] + self._adapter_shards[tp]

    @cached_property
    def _adapter_shards(self) -> dict[int, int]:
        actor, cut = self.work.actor, partial(expert_cut, self.work)
        return {size: rollout_shard(actor, size, cut(size)[0], adapters=True) for size in self._base_shards}

    @cached_property
    def _base_shards(self) -> dict[int, int]:
        sizes = {
            size
            for units in self.work.cluster.sizes
            for size in rollout_sizes(self.work, self.work.cluster.shape(units))
        }
        return {size: rollout_shard(self.work.actor, size, expert_cut(self.work, size)[0]) for size in sizes}

    def _generations(
        self, tp: int, shape: GridShape, grid: Grid | None, roles: Sequence[RoleOnLayout], in_place: bool
    ) -> Iterator[Generation]:
        """Yield one way to generate for each offload level that makes room for a larger cache than those before it."""
        work, best = self.work, -1
        for offloaded in LEVELS if roles else LEVELS[:1]:
            if not self._may_offload(roles, offloaded):
                continue
            kv_bytes = self._cache_bytes(tp, shape, self._room(tp, grid, roles, offloaded, in_place))
            if kv_bytes is None or kv_bytes <= best:
                continue
            best = kv_bytes
            cache = work.cache(tp)
            mean = work.load.prompt + work.load.response / 2
            fitting = int(cache.num_tokens(kv_bytes, mean) / mean)
            max_seqs = max(1, min(work.load.max_seqs, fitting))
            seconds = work.generation(shape, tp, max_seqs)
            steady = work.steady_generation(shape, tp, max_seqs) if not in_place and work.may_run_ahead else seconds
            yield Generation(tp, kv_bytes, seconds, steady, offloaded, self._offload_seconds(roles, offloaded))

    def _may_offload(self, roles: Sequence[RoleOnLayout], offloaded: tuple[str, ...]) -> bool:
        keeps = self.work.keeps
        return not keeps.values or all(keeps.allow(role.role.offloads[offloaded]) for role in roles)

    def _room(
        self, tp: int, grid: Grid | None, roles: Sequence[RoleOnLayout], offloaded: tuple[str, ...], in_place: bool
    ) -> int:
        """Return the bytes left for the cache on the worst stage, at the start and during generation; below 0: none."""
        work = self.work
        engine = engine_memory(self.work, tp)
        own = 0 if in_place else self._own(tp)
        rooms = []
        for number in range(len(roles[0].held) if roles else 1):
            on_stage = [role.held[number] for role in roles]
            start = sum(held.total - held.moments - held.in_eight_bits for held in on_stage)
            staying = sum(
                stays(role.role.spec.kind, held, offloaded) for role, held in zip(roles, on_stage, strict=True)
            )
            foreign = self._foreign(tp, grid, roles, number) if in_place and grid is not None else 0
            if staying + own + foreign + self._bucket > work.usable:
                return -1
            rooms.append(work.usable - max(start, staying) - own - foreign - engine)
        return min(rooms)

    def _own(self, tp: int) -> int:
        """Return the bytes of a separate rollout's weights, with the second buffer where generation may run ahead."""
        config = self.work.config.async_training
        in_slices = config.partial_rollout or self.work.may_run_ahead
        return self.shard(tp) * (2 if in_slices and config.second_buffer else 1)

    def _foreign(self, tp: int, grid: Grid, roles: Sequence[RoleOnLayout], number: int) -> int:
        """Return the bytes that a rank needs for generation besides its training weights."""
        adapters = self._adapter_shards[tp]
        if tp == grid.tp:
            adapters -= self._layers(roles, number) * self.adapter_bytes.layer // tp
        merged = self._layers(roles, number) * self.actor_bytes.layer // grid.tp
        own = merged if self.work.actor.spec.lora.is_merged else 0
        return self._foreign_base(tp, grid, roles, number) + max(0, adapters) + own

    def _foreign_base(self, tp: int, grid: Grid, roles: Sequence[RoleOnLayout], number: int) -> int:
        """Return `_foreign` of the policy without its adapters."""
        whole = self._base_shards[tp]
        if (
            self.work.keeps.values.get(DROP)
            or tp != grid.tp
            or (self.work.actor.sizes.num_experts and (grid.ep, grid.expert_tp) != expert_cut(self.work, tp))
        ):
            return whole
        return max(0, whole - self._layers(roles, number) * self.actor_bytes.layer // tp)

    def _layers(self, roles: Sequence[RoleOnLayout], number: int) -> int:
        """Return the layers of a sampled stage of the actor."""
        actor = next(role for role in roles if role.role.name == self.work.actor.name)
        return sum(actor.ledger.stages.chunk_sizes[actor.stages[number]])

    def _cache_bytes(self, tp: int, shape: GridShape, room: int) -> int | None:
        """Return the bytes of the cache: for all sequences of a replica, or as many as fit in steps of a sixteenth.

        None if not even the longest sequence fits, or a kept value does not.
        """
        work, key = self.work, "actor_rollout_ref.rollout.kv_cache_memory_bytes"
        cache, load = work.cache(tp), work.load
        least = cache.needed_bytes(work.longest)
        if key in work.keeps.values:
            kept = int(work.keeps.values[key])
            return kept if least <= kept <= room else None
        if room < least:
            return None
        replicas = shape.num_ranks // tp
        wanted = min(load.max_seqs, -(-load.num_samples // replicas))
        whole = (cache.blocks(work.longest) * wanted + 1) * cache.block_bytes
        if whole <= room:
            return whole
        mean = load.prompt + load.response / 2
        sequences = int(cache.num_tokens(room, mean) / mean)
        shift = max(0, sequences.bit_length() - 5)
        return min(room, max(least, cache.bytes_of(sequences >> shift << shift, mean)))

    def _offload_seconds(self, roles: Sequence[RoleOnLayout], offloaded: tuple[str, ...]) -> float:
        """Return the seconds of moving what is offloaded to the host and back, as `step_time.offload_seconds` does."""
        moved = 0
        for role in roles:
            moved += max(
                (held.parameters + held.tower if PARAM_OFFLOAD in {*offloaded} & {*role.role.spec.kind.offloads} else 0)
                + (held.moments + held.masters if "optimizer_offload" in offloaded else 0)
                for held in role.held
            )
        return 2 * moved / self.work.hardware.host_bandwidth


def stays(kind: RoleKind, held: StageHeld, offloaded: tuple[str, ...]) -> int:
    """Return the bytes of a role that stay on the device while its pool generates."""
    size = held.total
    if "grad_offload" in offloaded:
        size -= held.gradients
    if "optimizer_offload" in offloaded:
        size -= held.moments + held.masters
    if PARAM_OFFLOAD in {*offloaded} & {*kind.offloads}:
        size -= held.parameters + held.tower
    return size


def seconds_of(options: dict[str, dict[str, Option]]) -> tuple[float, float]:
    """Return the seconds of all scores and of all updates."""
    score, update = (sum(by_kind[kind].seconds for by_kind in options.values() if kind in by_kind) for kind in PASSES)
    return score, update


def beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether `one` is at most `other` in every number."""
    return all(a <= b for a, b in zip(one, other, strict=True))


def undominated(choices: Iterable[PoolChoice], kept: list[PoolChoice]) -> list[PoolChoice]:
    """Return the Pareto front of `kept` and `choices`; of equal ones the first."""
    for choice in choices:
        vector = choice.vector
        if not any(beats(one.vector, vector) for one in kept):
            kept = [*(one for one in kept if not beats(vector, one.vector)), choice]
    return kept
