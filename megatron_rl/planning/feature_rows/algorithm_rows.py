"""Rows of the algorithm: estimators, losses, the correction for the rollout, distillation losses."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.algorithms import STUDENTS_TOP, distillation_reads, estimator_traits, uses_critic
from megatron_rl.config.declarations import POLICY_LOSSES
from megatron_rl.config.distillation_keys import SELF
from megatron_rl.config.keys import ACTOR, CORRECTION
from megatron_rl.config.reward_keys import OVERLONG as OVERLONG_PART
from megatron_rl.planning.features import Feature, On, Relation, Requirement, RunFacts, Settings, Use, equals, where

ESTIMATOR = "algorithm.adv_estimator"
BYPASS, LOSS_TYPE = f"{CORRECTION}.bypass_mode", f"{CORRECTION}.loss_type"
IS, REJECTION = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"
NORMALIZED = f"{CORRECTION}.rollout_is_batch_normalize"
MODE, QUANTILE = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.policy_loss.top_entropy_quantile"
KL, OVERLONG = "algorithm.use_kl_in_reward", "reward_model.overlong_buffer.enable"
COMPONENTS, WEIGHTS = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"
DIVERGENCE = "distillation.distillation_loss.loss_mode"
TOP_K = "forward_kl_topk"
MINI, EPOCHS = f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs"


def _estimator_that_reads(column: str) -> On:
    def on(run: RunFacts) -> Iterator[Use]:
        if column in estimator_traits(run.config).reads:
            yield Use({ESTIMATOR: run.config.algorithm.adv_estimator}, {ESTIMATOR: "grpo"})

    return on


def _divergence_that_reads(column: str) -> On:
    def on(run: RunFacts) -> Iterator[Use]:
        if column in distillation_reads(run.config):
            yield Use({DIVERGENCE: run.value(DIVERGENCE)}, {DIVERGENCE: TOP_K})

    return on


def _critic(run: RunFacts) -> Iterator[Use]:
    if uses_critic(run.config):
        yield Use({"critic.enable": run.config.critic.enable}, {"critic.enable": False})


def _set(*keys: str) -> On:
    """Return `on` of a feature that any of several keys turns on."""

    def on(run: RunFacts) -> Iterator[Use]:
        given = {key: value for key in keys if (value := run.value(key))}
        if given:
            yield Use(given, {key: False if value is True else None for key, value in given.items()})

    return on


def _without_bypass(run: RunFacts) -> Settings:
    change: Settings = {BYPASS: False}
    change |= {LOSS_TYPE: "ppo_clip"} if run.value(LOSS_TYPE) == "reinforce" else {}
    return change | ({MODE: "vanilla"} if run.value(MODE) == "bypass_mode" else {})


def _head_moves(run: RunFacts, use: Use) -> str:
    config, actor = run.config, run.config.actor_rollout_ref.actor
    is_own = any(teacher.model_path == SELF for teacher in config.distillation.teacher_models.values())
    moves = actor.ppo_epochs > 1 or config.batch_sizes.mini_batch_prompts(actor) != config.batch_sizes.num_prompts
    return (
        "with a teacher self the head that it is read with moves after one optimizer step" if is_own and moves else ""
    )


def _no_component(run: RunFacts, use: Use) -> str:
    keys = run.config.algorithm.gdpo_reward_keys
    is_read = "components" in estimator_traits(run.config).reads
    lacks = is_read and keys and OVERLONG_PART not in keys
    return "gdpo reads components, not the score, and the penalty is none of them" if lacks else ""


def _with_component(run: RunFacts, use: Use) -> Settings:
    algorithm = run.config.algorithm
    weights: Settings = {} if algorithm.gdpo_reward_weights is None else {WEIGHTS: None}
    return {COMPONENTS: [*(algorithm.gdpo_reward_keys or []), OVERLONG_PART]} | weights


ROWS = (
    Feature("critic", "a critic", {"critic.enable": True}, _critic),
    Feature(
        "value_estimator",
        "an estimator with a critic",
        {ESTIMATOR: "gae"},
        _estimator_that_reads("old_values"),
        needs=(Relation("critic", "the estimator reads a critic's values", {"critic.enable": None}),),
    ),
    Feature("greedy_baseline", "ReMax", {ESTIMATOR: "remax"}, _estimator_that_reads("greedy_scores")),
    Feature("components", "GDPO", {ESTIMATOR: "gdpo"}, _estimator_that_reads("components")),
    Feature(
        "kl_in_reward",
        "KL in the reward",
        {KL: True},
        where(KL),
        excludes=(
            Relation(
                "components",
                "the estimator divides each component by its spread, so that the coefficient of a KL would cancel out",
                hint=f"with {ACTOR}.use_kl_loss=true, too, the KL is a term of the loss",
            ),
        ),
    ),
    Feature(
        "overlong_buffer",
        "a penalty for long responses",
        {OVERLONG: True},
        where(OVERLONG),
        of_layout=(
            Requirement(
                "with gdpo: overlong_reward among algorithm.gdpo_reward_keys",
                _no_component,
                _with_component,
                f"or set {OVERLONG}=false",
                lambda run, use: {COMPONENTS: run.value(COMPONENTS)},
            ),
        ),
    ),
    Feature("bypass", "old log-probs of the rollout", {BYPASS: True}, where(BYPASS)),
    Feature("importance_weights", "importance weights", {IS: "token"}, _set(IS, BYPASS)),
    Feature("correction", "a correction for older weights", {IS: "token"}, _set(IS, REJECTION, BYPASS)),
    Feature(
        "normalized_weights",
        "importance weights with mean 1",
        {NORMALIZED: True},
        where(NORMALIZED),
        excludes=(Relation("bypass", "a micro-batch does not have the weights of the others"),),
    ),
    Feature(
        "token_baseline",
        "the optimal token baseline",
        {ESTIMATOR: "optimal_token_baseline"},
        _estimator_that_reads("sum_pi_squared"),
        excludes=(Relation("bypass", "the estimator needs log-probs that the trainer computes", _without_bypass),),
    ),
    Feature("geo_mean", "GMPO", {MODE: "geo_mean"}, where(MODE, "vanilla", equals("geo_mean"))),
    Feature(
        "top_entropy",
        "tokens of high entropy alone",
        {QUANTILE: 0.2},
        where(QUANTILE, 1.0, lambda value: value < 1),
        excludes=(
            Relation("bypass", "no pass of the trainer measures entropies before the update"),
            Relation("geo_mean", "the loss term of a token trains all tokens of its response"),
        ),
    ),
    Feature(
        "bypass_loss",
        "the loss of bypass mode",
        {MODE: "bypass_mode"},
        where(MODE, "vanilla", equals("bypass_mode")),
        needs=(Relation("bypass", "this loss reads the log-probs of the rollout as old ones"),),
    ),
    Feature(
        "other_loss",
        "another policy loss than PPO's",
        {MODE: "cispo"},
        where(MODE, "vanilla", lambda value: value not in POLICY_LOSSES["vanilla"].names),
    ),
    Feature(
        "reinforce",
        "REINFORCE with importance weights",
        {LOSS_TYPE: "reinforce"},
        where(LOSS_TYPE, "ppo_clip", equals("reinforce")),
        needs=(Relation("bypass", f"without bypass mode {MODE} selects the loss"),),
        excludes=(
            Relation(
                "other_loss",
                "it would replace this loss",
                {MODE: "vanilla"},
                when=lambda run: run.config.algorithm.rollout_correction.bypass_mode,
            ),
        ),
    ),
    Feature(
        "students_top",
        "divergence over the student's likeliest tokens",
        {DIVERGENCE: "reverse_kl_topk"},
        _divergence_that_reads(STUDENTS_TOP),
        excludes=(Relation("bypass", "the trainer's pass for old log-probs finds these tokens, and is left out"),),
    ),
    Feature(
        "exact_divergence",
        "divergence over the vocabulary",
        {DIVERGENCE: "forward_kl"},
        _divergence_that_reads("teacher_hidden"),
        of_layout=(
            Requirement(
                "one optimizer step, with the policy as its own teacher",
                _head_moves,
                lambda run, use: {MINI: run.config.data.train_batch_size, EPOCHS: 1},
                f"or set {DIVERGENCE}={TOP_K}",
                lambda run, use: {MINI: run.value(MINI), EPOCHS: run.value(EPOCHS)},
            ),
        ),
    ),
    Feature("pretraining", "a pretraining loss", {"ptx.coef": 0.05}, where("ptx.coef", 0.0, lambda value: value > 0)),
)
