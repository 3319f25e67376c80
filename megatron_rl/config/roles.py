"""Which roles a run has, how each runs, and which pool of ranks it lives on: one table of plain data.

Preflight, memory plan, time estimate and the ranks themselves read this table; none of them lists roles by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.algorithms import uses_critic, uses_reference
from megatron_rl.config.as_stage import holds_reference
from megatron_rl.config.declarations import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES, AnswerLossTraits
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import DPO, REWARD, SFT, WITHOUT_ROLLOUT
from megatron_rl.config.trainer import GLOBAL_POOL

ACTOR, REFERENCE, CRITIC, REWARD_MODEL, ROLLOUT = "actor", "reference", "critic", "reward_model", "rollout"
"""Kinds of roles; a kind is also the name of its only role, except that there may be further reward models."""
TUNED, SCORER = "tuned", "scorer"
"""Kinds of the trained role of a stage that does not generate: a policy, by name the actor, and a reward model, by name
the critic, as it is saved and exported like one."""

ROLLOUT_POOL, REWARD_POOL = "rollout_pool", "reward_pool"
"""Pools that verl's own keys make: hybrid_engine=false, and reward_model.enable_resource_pool=true."""


@dataclass(frozen=True)
class PassSpec:
    """One way a role passes over a batch, and how it is cut into micro-batches.

    phase: its name in timings, in memory and in plans. num_rows: samples of a micro-batch, where max_tokens is None.
    max_tokens: tokens of a micro-batch, where samples are joined by their tokens. key: the key of whichever of the two
    counts. extra_tokens: what the role reads beyond prompt and response. longest: tokens of the longest sequence
    without these, where it is not that of prompt and response: of conversations that are tokenised anew, or of answers
    that stay together. scored: tokens of these whose log-probs are needed; None: those of the longest response.
    """

    phase: str
    num_rows: int
    max_tokens: int | None
    remove_padding: bool
    key: str
    extra_tokens: int = 0
    longest: int | None = None
    scored: int | None = None


@dataclass(frozen=True)
class Mixed:
    """Examples that join the samples of every optimizer step: how many, and tokens of the longest, all of which may
    count."""

    num_examples: int
    longest: int


@dataclass(frozen=True)
class RoleSpec:
    """One role. key: the group of its settings. model_path: the Hugging Face folder it starts from.

    megatron: its training layout; of the rollout the actor's, which names the dtype. score, update: its passes; a role
    with `update` is trained and saved. settings: the group itself. mixed: what its update reads beside the samples.
    """

    name: str
    kind: str
    key: str
    pool: str
    model_path: str
    model_key: str
    megatron: MegatronConfig
    settings: Any
    score: PassSpec | None = None
    update: PassSpec | None = None
    mixed: Mixed | None = None

    @property
    def is_trained(self) -> bool:
        return self.update is not None

    @property
    def has_value_head(self) -> bool:
        """Whether the model ends in a head of one value instead of one logit for each token of the vocabulary."""
        return self.kind in (CRITIC, REWARD_MODEL, SCORER)

    @property
    def reads_text(self) -> bool:
        """Whether it is a reward model that tokenises conversations with its own tokenizer."""
        return self.kind == REWARD_MODEL and self.settings.model.input_tokenizer is not None

    @property
    def passes(self) -> list[PassSpec]:
        """Those that it has, scoring first."""
        return [one for one in (self.score, self.update) if one is not None]

    @property
    def phases(self) -> dict[str, str]:
        """What "score" and "update" stand for in the phases of its methods."""
        passes = {"score": self.score, "update": self.update}
        return {label: one.phase for label, one in passes.items() if one is not None}


@dataclass(frozen=True)
class PoolSize:
    """Machines and ranks per machine of a pool, and the keys that say so."""

    num_nodes: int
    num_ranks_per_node: int
    nodes_key: str
    ranks_key: str

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes_key}={self.num_nodes} * {self.ranks_key}={self.num_ranks_per_node}"


@dataclass(frozen=True)
class PoolSpec:
    """A named set of ranks with one world of their own, and the roles that its processes host."""

    name: str
    size: PoolSize
    roles: tuple[RoleSpec, ...]

    @property
    def world_size(self) -> int:
        return self.size.world_size

    @property
    def megatron_roles(self) -> tuple[RoleSpec, ...]:
        """Its roles on Megatron's grid, which all have one layout."""
        return tuple(role for role in self.roles if role.kind != ROLLOUT)

    @property
    def layout(self) -> MegatronConfig:
        """The layout of its grid; where nobody but the rollout lives, one rank of TP and PP."""
        return self.megatron_roles[0].megatron if self.megatron_roles else MegatronConfig()

    def role(self, kind: str) -> RoleSpec | None:
        """Its only role of a kind, or None."""
        return next((role for role in self.roles if role.kind == kind), None)


@dataclass(frozen=True)
class Placement:
    """Every role by name, in the order in which they are built, and every pool by name, the actor's first."""

    roles: dict[str, RoleSpec]
    pools: dict[str, PoolSpec]

    @classmethod
    def of(cls, config: RunConfig) -> Placement:
        """The configured one, which must have passed preflight. Raises KeyError for a pool that nobody defines."""
        roles = {role.name: role for role in roles_of(config)}
        sizes = pool_sizes(config)
        names = dict.fromkeys(role.pool for role in roles.values())
        hosted = {name: tuple(role for role in roles.values() if role.pool == name) for name in names}
        return cls(roles, {name: PoolSpec(name, sizes[name], inside) for name, inside in hosted.items()})

    @property
    def is_colocated(self) -> bool:
        """Whether generation reads the actor's own memory."""
        return self.generates and self.roles[ROLLOUT].pool == self.roles[ACTOR].pool

    @property
    def generates(self) -> bool:
        """Whether there is a rollout."""
        return ROLLOUT in self.roles

    @property
    def leader(self) -> RoleSpec:
        """The role that is there in every step: the actor, or the one that a stage trains."""
        return next(iter(self.roles.values()))

    @property
    def megatron_roles(self) -> list[RoleSpec]:
        """Every role but the rollout."""
        return [role for role in self.roles.values() if role.kind != ROLLOUT]

    @property
    def trained(self) -> list[RoleSpec]:
        """The roles that a checkpoint keeps."""
        return [role for role in self.roles.values() if role.is_trained]

    @property
    def reward_models(self) -> list[RoleSpec]:
        """Every reward model, `reward_model` first."""
        return [role for role in self.roles.values() if role.kind == REWARD_MODEL]

    @property
    def world_size(self) -> int:
        """Ranks of all pools."""
        return sum(pool.world_size for pool in self.pools.values())

    def pool_of(self, role: str) -> PoolSpec:
        """The pool that hosts a role."""
        return self.pools[self.roles[role].pool]


def pool_sizes(config: RunConfig) -> dict[str, PoolSize]:
    """Every pool that is defined, whether or not a role lives there; the user's own replace those of the same name."""
    trainer, rollout, reward = config.trainer, config.actor_rollout_ref.rollout, config.reward_model
    sizes = {
        GLOBAL_POOL: PoolSize(trainer.nnodes, trainer.n_gpus_per_node, "trainer.nnodes", "trainer.n_gpus_per_node")
    }
    if config.actor_rollout_ref.hybrid_engine is False:
        key = "actor_rollout_ref.rollout"
        sizes[ROLLOUT_POOL] = PoolSize(
            rollout.nnodes, rollout.n_gpus_per_node, f"{key}.nnodes", f"{key}.n_gpus_per_node"
        )
    if reward.enable_resource_pool:
        key = "reward_model"
        sizes[REWARD_POOL] = PoolSize(reward.nnodes, reward.n_gpus_per_node, f"{key}.nnodes", f"{key}.n_gpus_per_node")
    for name, pool in config.pools.items():
        key = f"pools.{name}"
        sizes[name] = PoolSize(pool.nnodes, pool.n_gpus_per_node, f"{key}.nnodes", f"{key}.n_gpus_per_node")
    return sizes


def rollout_pool(config: RunConfig) -> str:
    """The pool that generates: `rollout.pool`, or verl's where hybrid_engine=false says no more than that."""
    shared = config.actor_rollout_ref
    says_nothing = shared.rollout.pool == shared.actor.pool
    return ROLLOUT_POOL if shared.hybrid_engine is False and says_nothing else shared.rollout.pool


def reward_pool(config: RunConfig) -> str:
    """The pool of `reward_model`: `reward_model.pool`, or verl's where enable_resource_pool=true says no more."""
    reward = config.reward_model
    return REWARD_POOL if reward.enable_resource_pool and reward.pool == GLOBAL_POOL else reward.pool


def trained_roles(config: RunConfig) -> dict[str, str]:
    """Role that is trained, and saved in a checkpoint -> the Hugging Face folder that it starts from."""
    return {role.name: role.model_path for role in roles_of(config) if role.is_trained}


def roles_of(config: RunConfig) -> Iterator[RoleSpec]:
    """Every role of a run, in the order in which they are built: a rollout on the actor's memory comes after it."""
    if config.trainer.stage in WITHOUT_ROLLOUT:
        yield from _stage_roles(config)
        return
    shared, reward = config.actor_rollout_ref, config.reward_model
    yield _actor(config)
    if uses_reference(config):
        yield _reference(config)
    if uses_critic(config):
        yield _critic(config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    if reward.enable:
        yield _reward_model(REWARD_MODEL, REWARD_MODEL, reward, reward_pool(config), "rm_scores", longest)
    for name, further in config.reward_models.items():
        yield _reward_model(name, f"reward_models.{name}", further, further.pool, f"rm_scores_{name}", longest)
    yield RoleSpec(
        ROLLOUT,
        ROLLOUT,
        "actor_rollout_ref.rollout",
        rollout_pool(config),
        shared.model.path,
        "actor_rollout_ref.model.path",
        shared.actor.megatron,
        shared.rollout,
    )


ANSWERS = {SFT: 1, REWARD: 2, DPO: 2}
"""Answers that stay together, in plans: preferences are taken to be pairs."""


def answers_together(config: RunConfig) -> int:
    """Answers to one prompt that are never split, as plans take it: of two, where they are compared."""
    stage, compares = config.trainer.stage, AnswerLossTraits()
    losses = {
        REWARD: REWARD_MODEL_LOSSES.traits(config.reward_training.loss, compares),
        DPO: PREFERENCE_LOSSES.traits(config.dpo.loss, compares),
    }
    return 1 if losses.get(stage, compares).alone else ANSWERS[stage]


def _stage_roles(config: RunConfig) -> Iterator[RoleSpec]:
    """The role that a stage trains, and where it is asked for the reference beside it."""
    stage, together = config.trainer.stage, answers_together(config)
    role = replace(_critic(config), kind=SCORER) if stage == REWARD else replace(_actor(config), kind=TUNED)
    longest = config.data.max_prompt_length + config.data.max_response_length + (stage == REWARD)
    if role.update is not None and together > 1:
        update = replace(role.update, longest=together * longest, scored=together * config.data.max_response_length)
        role = replace(role, update=update)
    if stage == REWARD and role.score is not None:
        one_row = -(-longest // max(1, role.megatron.context_parallel_size))
        tokens = role.score.max_tokens and max(role.score.max_tokens, one_row)
        role = replace(role, score=replace(role.score, longest=longest, max_tokens=tokens))
    if role.score is not None:
        role = replace(role, score=replace(role.score, phase="scores" if stage == REWARD else "log_probs"))
    yield role
    if stage == DPO and holds_reference(config):
        yield _reference(config)


def _actor(config: RunConfig) -> RoleSpec:
    shared, key = config.actor_rollout_ref, "actor_rollout_ref.actor"
    actor, rollout, packed = shared.actor, shared.rollout, shared.model.use_remove_padding
    return RoleSpec(
        ACTOR,
        ACTOR,
        key,
        actor.pool,
        shared.model.path,
        "actor_rollout_ref.model.path",
        actor.megatron,
        actor,
        score=_pass(
            "old_log_prob",
            packed,
            "actor_rollout_ref.rollout",
            rollout.log_prob_use_dynamic_bsz,
            {"log_prob_micro_batch_size_per_gpu": rollout.log_prob_micro_batch_size_per_gpu},
            {"log_prob_max_token_len_per_gpu": rollout.log_prob_max_token_len_per_gpu},
        ),
        update=_update_pass("update_actor", packed, key, actor),
        mixed=Mixed(config.ptx.mini_batch_size, pretraining_length(config)) if config.ptx.coef else None,
    )


def pretraining_length(config: RunConfig) -> int:
    """Tokens of an example of `ptx.files` at most."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    return longest if config.ptx.max_length is None else config.ptx.max_length


def _reference(config: RunConfig) -> RoleSpec:
    shared, key = config.actor_rollout_ref, "actor_rollout_ref.ref"
    ref = shared.ref
    return RoleSpec(
        REFERENCE,
        REFERENCE,
        key,
        ref.pool,
        shared.model.path,
        "actor_rollout_ref.model.path",
        ref.megatron,
        ref,
        score=_pass(
            "ref",
            shared.model.use_remove_padding,
            key,
            ref.log_prob_use_dynamic_bsz,
            {"log_prob_micro_batch_size_per_gpu": ref.log_prob_micro_batch_size_per_gpu},
            {"log_prob_max_token_len_per_gpu": ref.log_prob_max_token_len_per_gpu},
        ),
    )


def _critic(config: RunConfig) -> RoleSpec:
    critic = config.critic
    packed = critic.model.use_remove_padding
    return RoleSpec(
        CRITIC,
        CRITIC,
        CRITIC,
        critic.pool,
        critic.model.path,
        "critic.model.path",
        critic.megatron,
        critic,
        score=_pass(
            "values",
            packed,
            CRITIC,
            critic.use_dynamic_bsz,
            {"forward_micro_batch_size_per_gpu": critic.forward_micro_batch_size_per_gpu},
            {"forward_max_token_len_per_gpu": critic.forward_max_token_len_per_gpu},
        ),
        update=_update_pass("update_critic", packed, CRITIC, critic),
    )


def _reward_model(name: str, key: str, settings: Any, pool: str, phase: str, longest: int) -> RoleSpec:
    """A frozen classifier, which reads one token more than the sequence has: room for it is always there.

    longest: tokens of the longest prompt with the longest response.
    """
    own = None
    if settings.model.input_tokenizer is not None:
        own = longest if settings.max_length is None else settings.max_length
    one_row = -(-((own or longest) + 1) // max(1, settings.megatron.context_parallel_size))
    return RoleSpec(
        name,
        REWARD_MODEL,
        key,
        pool,
        settings.model.path,
        f"{key}.model.path",
        settings.megatron,
        settings,
        score=_pass(
            phase,
            settings.model.use_remove_padding,
            key,
            settings.use_dynamic_bsz,
            {"micro_batch_size_per_gpu": settings.micro_batch_size_per_gpu},
            {"forward_max_token_len_per_gpu": max(settings.forward_max_token_len_per_gpu, one_row)},
            extra_tokens=1,
            longest=own,
        ),
    )


def _update_pass(phase: str, packed: bool, key: str, settings: Any) -> PassSpec:
    return _pass(
        phase,
        packed,
        key,
        settings.use_dynamic_bsz,
        {"ppo_micro_batch_size_per_gpu": settings.ppo_micro_batch_size_per_gpu},
        {"ppo_max_token_len_per_gpu": settings.ppo_max_token_len_per_gpu},
    )


def _pass(
    phase: str,
    packed: bool,
    group: str,
    is_dynamic: bool,
    rows: dict[str, int],
    tokens: dict[str, int],
    extra_tokens: int = 0,
    longest: int | None = None,
) -> PassSpec:
    """rows, tokens: the key in `group` and its value, of which `is_dynamic` chooses one."""
    (rows_key, num_rows), (tokens_key, max_tokens) = *rows.items(), *tokens.items()
    key = f"{group}.{tokens_key if is_dynamic else rows_key}"
    return PassSpec(phase, num_rows, max_tokens if is_dynamic else None, packed, key, extra_tokens, longest)
