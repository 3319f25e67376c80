"""Rows of the parts of a run: device, pools, teachers, references, reward models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_rl.checkpoint.identity import tower_facts
from megatron_rl.checkpoint.model_folder import ModelFolder, form_of_images
from megatron_rl.config.distillation_keys import SELF
from megatron_rl.config.keys import ACTOR, REF, ROLLOUT
from megatron_rl.config.roles import PoolSize, pool_sizes
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.config.tasks import DPO, PPO
from megatron_rl.config.trainer import LOCAL, RAY
from megatron_rl.planning.features import (
    CPU,
    CUDA,
    Feature,
    Relation,
    Requirement,
    RunFacts,
    Settings,
    Use,
    equals,
    where,
)

DEVICE = "trainer.device"
HYBRID = "actor_rollout_ref.hybrid_engine"
LAUNCHER = "trainer.launcher"
TEACHERS = "distillation.teacher_models"
SYNC, ALPHA = f"{REF}.sync_ref_model", f"{REF}.ref_model_mixup_alpha"
LORA_RANK = "actor_rollout_ref.model.lora.rank"
IMAGES = "data.image_key"
EARLY = "reward_model.launch_reward_fn_async"
VALIDATION_ONLY = "custom_reward_function.validation_only"


def _own_pool(run: RunFacts) -> Iterator[Use]:
    shared = run.config.actor_rollout_ref
    key, home = f"{ROLLOUT}.pool", shared.actor.pool
    if not run.config.generates or run.rollout_pool == home:
        return
    off: Settings = {HYBRID: None} if shared.hybrid_engine is False else {}
    off |= {key: home} if shared.rollout.pool != home else {}
    off |= {f"{ROLLOUT}.nnodes": 0} if shared.rollout.nnodes > 0 else {}
    given: Settings = {key: shared.rollout.pool} if shared.rollout.pool != home else {HYBRID: False}
    yield Use(given, off, run.policy)


def _reward_model(run: RunFacts) -> Iterator[Use]:
    config = run.config
    if config.reward_model.enable:
        yield Use({"reward_model.enable": True}, {"reward_model.enable": False})
    for name, reward in config.reward_models.items():
        yield Use({f"reward_models.{name}.model.path": reward.model.path}, {})


def _several_nodes(run: RunFacts) -> list[PoolSize]:
    sizes = pool_sizes(run.config)
    return [sizes[pool] for pool in dict.fromkeys(role.pool for role in run.roles) if pool in sizes]


def _nodes(run: RunFacts, use: Use) -> Settings:
    return {size.nodes_key: size.num_nodes for size in _several_nodes(run) if size.num_nodes > 1}


def _teachers(run: RunFacts) -> dict[str, Any]:
    distillation = run.config.distillation
    return distillation.teacher_models if distillation.enabled else {}


def _own_teacher(run: RunFacts) -> Iterator[Use]:
    for name, teacher in _teachers(run).items():
        if teacher.model_path == SELF:
            yield Use({f"{TEACHERS}.{name}.model_path": SELF}, {})


def _teachers_prompt(run: RunFacts) -> Iterator[Use]:
    for name, teacher in _teachers(run).items():
        if teacher.prompt_key is not None:
            key = f"{TEACHERS}.{name}.prompt_key"
            yield Use({key: teacher.prompt_key}, {key: None})


def _reference(run: RunFacts) -> Iterator[Use]:
    if run.config.generates and any(role.kind.initial_of is not None for role in run.roles):
        yield Use({f"{ACTOR}.use_kl_loss": run.config.actor_rollout_ref.actor.use_kl_loss}, {})


def _live_reference(run: RunFacts) -> Iterator[Use]:
    if isinstance(run.config, TaskConfig) and run.config.holds_reference:
        yield Use({"dpo.reference": "on_the_fly"}, {"dpo.reference": "precompute"})


def _follows(run: RunFacts) -> Iterator[Use]:
    if run.config.actor_rollout_ref.ref.sync_ref_model and run.config.trainer.stage in (PPO, DPO):
        yield Use({SYNC: True}, {SYNC: False}, run.policy)


def _compares(run: RunFacts) -> bool:
    return isinstance(run.config, TaskConfig) and run.config.needs_reference


def _blind(run: RunFacts, use: Use) -> str:
    model = run.model_of(run.policy)
    path = run.policy.model_path
    sees = path is not None and form_of_images(ModelFolder(path)) is not None
    return "" if model is None or model.model is None or sees else "it has no vision tower that is read"


def _other_towers(run: RunFacts) -> dict[str, Any]:
    """The model folders of roles that would read the features of another tower than their own."""
    readers = [role for role in run.megatron_roles if role.model_path not in (None, run.policy.model_path)]
    own = tower_facts(run.policy.model_path) if readers and run.policy.model_path else None
    return {role.model_key: role.model_path for role in readers if own is None or tower_facts(role.model_path) != own}


def _free_of_reference(run: RunFacts, use: Use) -> str:
    is_free = isinstance(run.config, TaskConfig) and not run.config.needs_reference
    return "nothing is compared with a reference" if is_free else ""


ROWS = (
    Feature("cpu", "CPUs", {DEVICE: CPU}, where(DEVICE, CUDA, equals(CPU)), in_tasks=True),
    Feature("gpu", "GPUs", {DEVICE: CUDA}, where(DEVICE, CPU, equals(CUDA)), proven=(CUDA,), in_tasks=True),
    Feature(
        "local_launcher",
        "ranks without Ray",
        {LAUNCHER: LOCAL},
        where(LAUNCHER, RAY, equals(LOCAL)),
        of_layout=(
            Requirement(
                "pools of one node",
                lambda run, use: "local starts ranks on this machine alone" if _nodes(run, use) else "",
                keys=_nodes,
                hint="or take one node",
            ),
        ),
        in_tasks=True,
    ),
    Feature("own_pool", "a rollout pool of its own", {HYBRID: False}, _own_pool),
    Feature("reward_model", "a reward model", {"reward_model.enable": True}, _reward_model),
    Feature(
        "held_out_reward",
        "a reward function for validation alone",
        {VALIDATION_ONLY: True},
        where(VALIDATION_ONLY),
        needs=(Relation("reward_model", "training would have no reward", gives_up=True),),
    ),
    Feature("early_rewards", "rewards during generation", {EARLY: True}, where(EARLY)),
    Feature("multi_turn", "multi-turn", {f"{ROLLOUT}.multi_turn.enable": True}, where(f"{ROLLOUT}.multi_turn.enable")),
    Feature(
        "own_teacher",
        "the policy as its own teacher",
        {f"{TEACHERS}.NAME.model_path": SELF},
        _own_teacher,
    ),
    Feature(
        "teachers_prompt",
        "a prompt of the teacher's own",
        {f"{TEACHERS}.NAME.prompt_key": "hinted_prompt"},
        _teachers_prompt,
        excludes=(Relation("multi_turn", "an environment makes the prompts of an episode"),),
    ),
    Feature(
        "images",
        "images in prompts",
        {IMAGES: "images"},
        where(IMAGES, None),
        excludes=(Relation("teachers_prompt", "the places of images are those of the policy's prompt"),),
        of_model=(Requirement("a model that reads images", _blind),),
        of_layout=(
            Requirement(
                "one vision tower for all roles that read rows",
                lambda run, use: "features are those of the actor's tower" if _other_towers(run) else "",
                keys=lambda run, use: _other_towers(run),
                hint="or take the actor's folder, or one that was trained from it",
            ),
        ),
        in_tasks=True,
    ),
    Feature("reference", "a reference", {f"{ACTOR}.use_kl_loss": True}, _reference),
    Feature(
        "live_reference", "a reference in every step", {"dpo.reference": "on_the_fly"}, _live_reference, in_tasks=True
    ),
    Feature(
        "following_reference",
        "a reference that follows the policy",
        {SYNC: True},
        _follows,
        needs=(
            Relation(
                "reference",
                "nothing is compared with a reference",
                gives_up=True,
                when=lambda run: run.config.generates,
            ),
            Relation("live_reference", "only first log-probs are kept, no weights of the reference", when=_compares),
        ),
        of_layout=(
            Requirement(
                "a loss that reads a reference",
                _free_of_reference,
                keys=lambda run, use: {"dpo.loss": run.config.dpo.loss},
            ),
            Requirement(
                f"{ALPHA}=1 with adapters",
                lambda run, use: (
                    "a mixture of two adapters is not one of the same rank"
                    if run.config.actor_rollout_ref.model.lora.rank > 0 and run.value(ALPHA) != 1
                    else ""
                ),
                {ALPHA: 1.0},
                keys=lambda run, use: {LORA_RANK: run.value(LORA_RANK), ALPHA: run.value(ALPHA)},
            ),
        ),
        in_tasks=True,
    ),
)
