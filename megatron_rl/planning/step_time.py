"""Seconds of one step: of each phase on its pool, and the critical path through the pools.

    images -> reshard -> gen -> scores -> updates -> next step
The rounds follow each other: generation needs features of images and the weights, scores need the samples, updates
need all scores, and a step ends when every role is updated. Inside a round pools work in parallel, and a pool runs its
phases one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_rl.config.megatron import COUNTED_PARTS, UNEVEN_STAGES, MegatronConfig
from megatron_rl.config.roles import PassSpec, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.config.tasks import DPO
from megatron_rl.parallel.context_packs import needed_size
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planning.critical_path import Task, Timeline, simulate_tasks
from megatron_rl.planning.follower_transfers import follower_transfers
from megatron_rl.planning.hardware import Hardware, Overheads
from megatron_rl.planning.layout_sizes import Layout
from megatron_rl.planning.memory import GEN, IMAGES, RESHARD, phase_order
from megatron_rl.planning.run_models import PoolModels, RunModels, host_copy_bytes
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.time import FP32, Estimator, ModelCost
from megatron_rl.planning.transition import TransitionPlan

CALL_SECONDS = Overheads().call
"""Controller time for each rank that it calls, on two cores (`scripts/bench/controller.py`)."""


@dataclass(frozen=True)
class StepTime:
    """Planned time of one step.

    seconds: phase -> seconds, in the order of a step. pools: phase -> pools that work in it. rounds: phases that may
    run in parallel where their pools differ. wants: phase -> mean number of its ranks that compute at the same time.
    parallel_ranks: how many ranks can, where all pools share one machine's cores; 0: nothing is shared. turns_share:
    part of that which is left while more ranks want to.
    """

    seconds: dict[str, float]
    pools: dict[str, tuple[str, ...]]
    rounds: tuple[tuple[str, ...], ...]
    wants: dict[str, float] = field(default_factory=dict)
    parallel_ranks: float = 0.0
    turns_share: float = 1.0

    @cached_property
    def timeline(self) -> Timeline:
        """When each phase starts and stops."""
        tasks: list[Task] = []
        before: tuple[str, ...] = ()
        for phases in self.rounds:
            tasks += [
                Task(phase, self.seconds[phase], self.pools[phase], before, self.wants.get(phase, 0.0))
                for phase in phases
            ]
            before = phases or before
        return simulate_tasks(tasks, self.parallel_ranks, self.turns_share)

    @property
    def critical_path(self) -> list[str]:
        """The phases that decide the length of a step; each waited for the one before it."""
        return self.timeline.critical_path

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.timeline.total


def step_load(config: RunConfig, kv_tokens: int, mean_lengths: tuple[float, float]) -> Load:
    """Return the load of one step. kv_tokens: that the cache of a replica holds. mean_lengths: of prompt and response.

    Mini-batches and passes are those of the actor's update.
    """
    shared, data = config.actor_rollout_ref, config.data
    actor, rollout = shared.actor, shared.rollout
    prompt, response = mean_lengths
    length = prompt + response
    block = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu * length
    fitting = int(kv_tokens / (prompt + response / 2))
    return Load(
        num_samples=config.batch_sizes.num_samples,
        prompt=prompt,
        response=response,
        max_response=data.max_response_length,
        mini_batch=config.batch_sizes.mini_batch_samples(actor),
        block_tokens=int(block),
        epochs=actor.ppo_epochs,
        max_seqs=max(1, min(rollout.max_num_seqs, fitting)),
        rows_of_prompt=rollout.n if shared.model.enable_tree_training else 1,
    )


def step_time(models: RunModels, hardware: Hardware, load: Load, transition: TransitionPlan) -> StepTime:
    """Return the time of a step with all phases of a run. load: from `step_load`."""
    placement = models.placement
    seconds = {
        RESHARD: transition.seconds(hardware) + offload_seconds(models, hardware),
        GEN: generation_seconds(generation(models, hardware), load, models.config),
    }
    training, generating = models.training.spec.name, models.generating.spec.name
    pools = {RESHARD: tuple(dict.fromkeys((training, generating))), GEN: (generating,)}
    scores, updates = set(), set()
    wants: dict[str, float] = {}
    images = models.images(load.prompt)
    for role in placement.megatron_roles:
        pool = models.pools[role.pool]
        if role.score is not None and role.score.is_run:
            cp_size = sharing(pool, role.score, load)
            estimator = estimator_of(pool, role, hardware, cp_size)
            busy = estimator.scored(scored_load(load, role.score, models.config, cp_size))
            seconds[role.score.phase] = estimator.seconds(busy)
            wants[role.score.phase] = busy.work * pool.grid.world_size / estimator.seconds(busy)
            scores.add(role.score.phase)
        if role.update is not None:
            cp_size = sharing(pool, role.update, load)
            estimator = estimator_of(pool, role, hardware, cp_size)
            ledger = pool.ledger(role)
            updated = updated_load(load, role, models.config, ledger.recomputed_share(), cp_size)
            tower = images.flops_of_image if images and role.trains_tower else (0.0, 0.0)
            busy = estimator.trained(replace(updated, head_products=ledger.teaching.products, tower=tower))
            seconds[role.update.phase] = estimator.seconds(busy)
            wants[role.update.phase] = busy.work * pool.grid.world_size / estimator.seconds(busy)
            updates.add(role.update.phase)
        pools |= {pass_spec.phase: (role.pool,) for pass_spec in role.passes}
    if images:
        estimator = estimator_of(models.training, models.actor_role, hardware, models.grid.cp_size)
        busy = images.read(estimator.layout, hardware, estimator.dtype, placement.num_towers)
        seconds[IMAGES], pools[IMAGES] = estimator.seconds(busy), (training,)
        wants[IMAGES] = busy.work * models.grid.world_size / seconds[IMAGES]
    for transfer in follower_transfers(models):
        seconds[RESHARD] += transfer.seconds(hardware)
        pools[RESHARD] = tuple(dict.fromkeys((*pools[RESHARD], transfer.role.pool)))
    order = [phase for phase in phase_order(placement.megatron_roles) if phase in seconds]
    for phase, num_calls in calls(models, load).items():
        if phase in seconds:
            sizes = [models.pools[name].spec.size for name in pools[phase]]
            seconds[phase] += num_calls * max(
                dispatch_seconds(size.num_nodes, size.num_ranks_per_node, hardware) for size in sizes
            )
    rounds = ({IMAGES}, {RESHARD}, {GEN}, scores, updates)
    return StepTime(
        {phase: seconds[phase] for phase in order},
        {phase: pools[phase] for phase in order},
        tuple(tuple(phase for phase in order if phase in phases) for phases in rounds),
        wants,
        hardware.parallel_ranks,
        hardware.turns_share,
    )


def task_load(config: TaskConfig, length: float) -> Load:
    """Return the load of one step on sequences of `length` tokens."""
    rows = config.data.train_batch_size * config.answers_together
    return Load(rows, 0.0, length, config.longest_sequence, mini_batch=rows, block_tokens=1)


def task_time(config: TaskConfig, models: RunModels, hardware: Hardware, load: Load) -> StepTime:
    """Return the seconds of one step: the update, the reference's pass where every batch has one, and with kto the
    passes over the step's prompts with other responses.

    Passes for validation, and those that compute a stored reference before the first step, do not count.
    """
    seconds, pools = dict[str, float](), dict[str, tuple[str, ...]]()
    if hardware.is_measured:
        # The rate was measured with passes like these; whatever else they take is in the overheads.
        load = replace(load, efficiency_share=1.0)
    has_baseline = config.trainer.stage == DPO and "kto" in config.dpo.loss
    for role in models.placement.megatron_roles:
        pool = models.pools[role.pool]
        estimator = estimator_of(pool, role, hardware, pool.grid.cp_size)
        recompute = pool.ledger(role).recomputed_share() if role.is_trained else 0.0
        call = dispatch_seconds(pool.spec.size.num_nodes, pool.spec.size.num_ranks_per_node, hardware)
        if role.update is not None:
            rows = replace(role.update, num_rows=role.update.num_rows * config.answers_together)
            asked = replace(load, block_tokens=block_tokens(load, rows, pool.grid.cp_size), recompute=recompute)
            seconds[role.update.phase] = estimator.train(asked) + call
        if role.score is not None and (role.update is None or has_baseline):
            asked = replace(load, block_tokens=block_tokens(load, role.score, pool.grid.cp_size))
            num_passes = 2 if role.update is None and has_baseline else 1
            seconds[role.score.phase] = num_passes * (estimator.forward(asked) + call)
        pools |= {pass_spec.phase: (role.pool,) for pass_spec in role.passes}
    for transfer in follower_transfers(models):
        seconds[RESHARD] = seconds.get(RESHARD, 0.0) + transfer.seconds(hardware)
        pools[RESHARD] = (models.training.spec.name, transfer.role.pool)
    order = [phase for phase in phase_order(models.placement.megatron_roles) if phase in seconds]
    return StepTime(
        {phase: seconds[phase] for phase in order},
        {phase: pools[phase] for phase in order},
        tuple((phase,) for phase in order),
    )


def dispatch_seconds(num_nodes: int, per_node: int, hardware: Hardware) -> float:
    """Return the seconds of one call of all ranks of a pool, one after the other."""
    return hardware.overheads.call * num_nodes * per_node


def calls(models: RunModels, load: Load) -> dict[str, int]:
    """Return phase -> calls of the controller in one step: one for each mini-batch of an update."""
    num_calls = dict.fromkeys((RESHARD, GEN), 1)
    if images := models.images(load.prompt):
        num_calls[IMAGES] = images.rounds(models.grid.dp_size) * models.placement.num_towers
    for role in models.placement.megatron_roles:
        if role.score is not None:
            num_calls[role.score.phase] = 1
        if role.update is not None:
            num_calls[role.update.phase] = updated_load(load, role, models.config).num_updates
    return num_calls


def offload_seconds(models: RunModels, hardware: Hardware) -> float:
    """Return the seconds of offloading to the host for generation and loading back, on the rank that moves most."""
    seconds = 0.0
    for role in models.generating.spec.megatron_roles:
        ledger, element = models.generating.ledger(role), models.generating.element
        offloaded = [0] * models.generating.grid.pp_size
        for pp_rank in range(len(offloaded)):
            offloaded[pp_rank] += sum(ledger.teacher_heads(pp_rank, resting=True).values())
            if role.megatron.param_offload:
                offloaded[pp_rank] += ledger.num_params(pp_rank) * element + ledger.held(pp_rank).tower
            if role.megatron.optimizer_offload and role.is_trained:
                offloaded[pp_rank] += ledger.weights.optimizer_share(pp_rank) * optimizer_bytes(element)
                offloaded[pp_rank] -= ledger.spared(pp_rank)
        seconds += 2 * max(offloaded) / hardware.host_bandwidth
    copied = max(host_copy_bytes(models, pp_rank) for pp_rank in range(models.generating.grid.pp_size))
    return seconds + copied / hardware.host_bandwidth


def optimizer_bytes(element: int) -> int:
    """Return the optimizer's bytes of one parameter: two moments, and a float32 master unless the weight is one."""
    return 2 * FP32 + (0 if element == FP32 else FP32)


def generation_seconds(estimator: Estimator, load: Load, config: RunConfig) -> float:
    """Return the seconds of generation: where samples wait for replies to their turns, at least those of one sample
    alone and its waits, as others are sampled meanwhile.
    """
    busy, turns = estimator.generate(load), config.actor_rollout_ref.rollout.multi_turn
    if not (config.has_turns and turns.planned_wait_s):
        return busy
    return max(busy, estimator.generate(replace(load, num_samples=1)) + turns.planned_wait_s)


def generation(models: RunModels, hardware: Hardware) -> Estimator:
    """Return the time estimator of the actor's model on the ranks that generate, whose training may be another's."""
    size = models.generating.spec.size
    num_ranks, rollout = models.generating.grid.world_size, models.rollout
    layout = Layout(num_ranks, size.num_ranks_per_node, rollout_tp=rollout.tp_size, rollout_dp=rollout.dp_size)
    lora = models.actor_role.lora
    cost = ModelCost.of(models.actor, lora if lora.crosses_alone else None)
    return Estimator(cost, layout, hardware, models.actor_role.megatron.dtype)


def sharing(pool: PoolModels, pass_spec: PassSpec, load: Load) -> int:
    """Return the context-parallel ranks that share a sequence; with dynamic CP, one of mean length."""
    grid = pool.grid
    if grid.most_sharing is None or pass_spec.max_tokens is None:
        return grid.cp_size
    longest = pass_spec.max_tokens * grid.most_sharing
    return needed_size([min(math.ceil(load.length), longest)], pass_spec.max_tokens, grid.most_sharing)


def estimator_of(pool: PoolModels, role: RoleSpec, hardware: Hardware, cp_size: int) -> Estimator:
    """Return the time estimator of a role's model on its pool. cp_size: ranks that share a sequence."""
    model, way = pool.model(role), role.megatron.override_transformer_config.cp_comm_type
    size = (pool.grid.world_size, pool.spec.size.num_ranks_per_node)
    layout = layout_of(pool.megatron, model.shape.num_layers, size, cp_size, way)
    return Estimator(ModelCost.of(model, role.lora), layout, hardware, role.megatron.dtype)


def layout_of(megatron: MegatronConfig, num_layers: int, size: tuple[int, int], cp: int, cp_comm_type: str) -> Layout:
    """Return the layout in which a model with `num_layers` layers is trained.

    size: ranks, and ranks of a node. cp: ranks that share a sequence. cp_comm_type: of the role.
    """
    stage_layers, pp = None, megatron.pipeline_model_parallel_size
    if any(getattr(megatron, key) for key in (*UNEVEN_STAGES, *COUNTED_PARTS)):
        stage_layers = tuple(map(sum, StagePlan.from_config(num_layers, megatron).chunk_sizes))
    return Layout(
        *size,
        megatron.tensor_model_parallel_size,
        pp,
        megatron.virtual_pipeline_model_parallel_size or 1,
        megatron.expert_model_parallel_size,
        cp=cp,
        cp_comm_type=cp_comm_type,
        stage_layers=stage_layers,
        etp=megatron.expert_tensor_parallel_size,
    )


def block_tokens(load: Load, pass_spec: PassSpec, cp_size: int) -> int:
    """Return the tokens of one pass on a rank: the token limit, or the rank's part of its rows of mean length."""
    return pass_spec.max_tokens or int(pass_spec.num_rows * load.length / cp_size)


def scored_load(load: Load, pass_spec: PassSpec, config: RunConfig, cp_size: int = 1) -> Load:
    """Return the load of a score. Sequences that are tokenised again are taken to fill the same share of their
    limit."""
    share = 1.0
    if pass_spec.longest is not None:
        share = pass_spec.longest / config.longest_sequence
    longer = replace(load, prompt=load.prompt * share + pass_spec.extra_tokens, response=load.response * share)
    longer = longer if pass_spec.as_tree else replace(longer, rows_of_prompt=1)
    return replace(longer, block_tokens=block_tokens(longer, pass_spec, cp_size))


def updated_load(load: Load, role: RoleSpec, config: RunConfig, recompute: float = 0.0, cp_size: int = 1) -> Load:
    """Return the load of an update: the role's own mini-batches, epochs and passes.

    recompute: share of its forward pass that runs twice. Raises ValueError for a role that is not trained.
    """
    if role.update is None:
        raise ValueError(f"{role.name} is not trained")
    mixed = None
    if role.mixed is not None:  # assumed to have half of their longest length, like prompts and responses
        mixed = replace(load, num_samples=role.mixed.num_examples, prompt=role.mixed.longest / 2, response=0.0)
        mixed = replace(mixed, rows_of_prompt=1)
        mixed = replace(mixed, block_tokens=block_tokens(mixed, role.update, cp_size))
    return replace(
        load,
        mini_batch=config.batch_sizes.mini_batch_samples(role.settings),
        epochs=role.settings.ppo_epochs,
        block_tokens=block_tokens(load, role.update, cp_size),
        recompute=recompute,
        mixed=mixed,
    )
