"""How long one step takes: seconds of each phase on its pool, and the path through the pools that decides.

    reshard -> gen -> scores -> updates -> next step
The four rounds follow each other: generation needs the weights, scores need the samples, updates need all scores, and
a step ends when every role is updated. Inside a round the pools work at once, and a pool runs its phases one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_rl.config.algorithms import scores_old_log_probs
from megatron_rl.config.roles import ACTOR, PassSpec, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.planner.hardware import Hardware
from megatron_rl.planner.memory import GEN, RESHARD, phase_order
from megatron_rl.planner.memory_report import MemoryReport
from megatron_rl.planner.recompute import Recompute
from megatron_rl.planner.run_models import PoolModels, RunModels
from megatron_rl.planner.time import Estimator, Layout, Load, ModelCost
from megatron_rl.planner.transition import TransitionPlan


@dataclass(frozen=True)
class StepTime:
    """seconds: phase -> of one step, in the order of a step. pools: phase -> those that work in it.

    rounds: phases that may run at the same time where their pools differ.
    """

    seconds: dict[str, float]
    pools: dict[str, tuple[str, ...]]
    rounds: tuple[tuple[str, ...], ...]

    @property
    def critical_path(self) -> list[str]:
        """The phases that decide how long a step takes: in every round those of the pool that is the last to end."""
        return [phase for phases in self.rounds for phase in self._slowest(phases)]

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds[phase] for phase in self.critical_path)

    def _slowest(self, phases: tuple[str, ...]) -> list[str]:
        by_pool: dict[tuple[str, ...], list[str]] = {}
        for phase in phases:
            by_pool.setdefault(self.pools[phase], []).append(phase)
        return max(by_pool.values(), key=lambda mine: sum(self.seconds[phase] for phase in mine), default=[])


def step_load(config: RunConfig, memory: MemoryReport, mean_lengths: tuple[float, float]) -> Load:
    """What one step asks for; its mini-batches and blocks are those of the actor's update."""
    shared, data = config.actor_rollout_ref, config.data
    actor, rollout = shared.actor, shared.rollout
    prompt, response = mean_lengths
    length = prompt + response
    block = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu * length
    fitting = int(memory.kv_tokens / (prompt + response / 2))
    return Load(
        num_samples=data.train_batch_size * rollout.n,
        prompt=prompt,
        response=response,
        max_response=data.max_response_length,
        mini_batch=min(actor.ppo_mini_batch_size, data.train_batch_size) * rollout.n,
        block_tokens=int(block),
        epochs=actor.ppo_epochs,
        max_seqs=max(1, min(rollout.max_num_seqs, fitting)),
    )


def step_time(models: RunModels, hardware: Hardware, load: Load, transition: TransitionPlan) -> StepTime:
    """Of all phases that this run has. load: the step's, as `step_load` gives it."""
    placement = models.placement
    seconds = {RESHARD: transition.seconds(hardware), GEN: generation(models, hardware).generate(load)}
    training, generating = models.training.spec.name, models.generating.spec.name
    pools = {RESHARD: tuple(dict.fromkeys((training, generating))), GEN: (generating,)}
    scores, updates = set(), set()
    for role in placement.megatron_roles:
        pool = models.pools[role.pool]
        estimator = _estimator(models, pool, role, hardware)
        if role.score is not None and (role.kind != ACTOR or scores_old_log_probs(models.config)):
            seconds[role.score.phase] = estimator.forward(_scored(load, role.score, models.config, pool.grid.cp_size))
            scores.add(role.score.phase)
        if role.update is not None:
            seconds[role.update.phase] = estimator.train(_updated(load, role, pool, models.config))
            updates.add(role.update.phase)
        pools |= {one.phase: (role.pool,) for one in role.passes}
    order = [phase for phase in phase_order(placement.megatron_roles) if phase in seconds]
    rounds = ({RESHARD}, {GEN}, scores, updates)
    return StepTime(
        {phase: seconds[phase] for phase in order},
        {phase: pools[phase] for phase in order},
        tuple(tuple(phase for phase in order if phase in one) for one in rounds),
    )


def generation(models: RunModels, hardware: Hardware) -> Estimator:
    """Of the actor's model on the ranks that generate."""
    return _estimator(models, models.generating, models.actor_role, hardware)


def _estimator(models: RunModels, pool: PoolModels, role: RoleSpec, hardware: Hardware) -> Estimator:
    """Of one role's model on the grid of a pool."""
    layout = Layout(
        pool.grid.world_size,
        pool.spec.size.num_ranks_per_node,
        pool.grid.tp_size,
        pool.grid.pp_size,
        pool.vpp_size,
        pool.grid.ep_size,
        models.rollout.tp_size,
        pool.grid.cp_size,
        role.megatron.override_transformer_config.cp_comm_type,
    )
    return Estimator(ModelCost.of(models.pools[role.pool].model(role)), layout, hardware, role.megatron.dtype)


def _block_tokens(load: Load, one: PassSpec, cp_size: int) -> int:
    """Tokens of one pass on a rank: as many as are joined, or its part of so many samples of mean length."""
    return one.max_tokens or int(one.num_rows * load.length / cp_size)


def _scored(load: Load, one: PassSpec, config: RunConfig, cp_size: int) -> Load:
    """With what the role reads. Sequences that are tokenised anew are assumed to fill as much of their limit."""
    share = 1.0
    if one.longest is not None:
        share = one.longest / (config.data.max_prompt_length + config.data.max_response_length)
    longer = replace(load, prompt=load.prompt * share + one.extra_tokens, response=load.response * share)
    return replace(longer, block_tokens=_block_tokens(longer, one, cp_size))


def _updated(load: Load, role: RoleSpec, pool: PoolModels, config: RunConfig) -> Load:
    """With the role's own mini-batches, epochs, passes and recomputed layers."""
    settings, prompts = role.settings, config.data.train_batch_size
    if role.update is None:
        raise ValueError(f"{role.name} is not trained")
    return replace(
        load,
        mini_batch=min(settings.ppo_mini_batch_size, prompts) * config.actor_rollout_ref.rollout.n,
        epochs=settings.ppo_epochs,
        block_tokens=_block_tokens(load, role.update, pool.grid.cp_size),
        recompute=recomputed_share(pool, role),
    )


def recomputed_share(pool: PoolModels, role: RoleSpec) -> float:
    """Share of a trained model's forward pass that is run twice."""
    model, recompute = pool.model(role), Recompute.of(role.megatron)
    stages = pool.stages(model)
    sizes = [len(chunk) for pp_rank in range(stages.pp_size) for chunk in stages.layers(pp_rank)]
    return recompute.share(sizes) + recompute.share_of_layer(pool.layer(model))
