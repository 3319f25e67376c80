"""Check every rule that needs only the configuration, the model's config.json and the file system.

This runs before any process starts and loads neither torch nor Ray, so that a mistake costs a second, not a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_rl.checkpoint.model_folder import ModelFolders, model_folders
from megatron_rl.config.keys import ROLLOUT, followed_keys
from megatron_rl.config.problems import without_echoes
from megatron_rl.config.role_kinds import StartsFrom
from megatron_rl.config.roles import PoolSpec, roles_of
from megatron_rl.config.rollout_keys import MTPUse
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.single_values import magnitude_problems
from megatron_rl.config.validate import value_problems
from megatron_rl.errors import Violation
from megatron_rl.model.families import FAMILIES, REWARD_FAMILIES, Family
from megatron_rl.planning.algorithm_rules import algorithm_problems
from megatron_rl.planning.async_rules import async_problems
from megatron_rl.planning.cache_rules import cache_problems
from megatron_rl.planning.distillation_rules import distillation_problems
from megatron_rl.planning.draft_rules import draft_problems
from megatron_rl.planning.eight_bit_rules import quantization_problems
from megatron_rl.planning.engine_rules import engine_problems
from megatron_rl.planning.feature_checks import feature_problems
from megatron_rl.planning.file_rules import file_problems, hardware_problems, path_problems
from megatron_rl.planning.folder_checks import STARTING_POINTS, ModelSizes, read_model_folder
from megatron_rl.planning.folder_files import end_token_problems, reading_problems
from megatron_rl.planning.image_rules import image_problems
from megatron_rl.planning.last_token_rules import shared_prompt_problems
from megatron_rl.planning.layout_rules import layout_problems, rollout_problems, sharing_problems
from megatron_rl.planning.length_rules import length_problems, task_length_problems
from megatron_rl.planning.lora_rules import lora_problems
from megatron_rl.planning.option_rules import option_problems
from megatron_rl.planning.pool_rules import countable_pools, pool_problems
from megatron_rl.planning.preference_rules import preference_problems
from megatron_rl.planning.pretraining_rules import pretraining_problems
from megatron_rl.planning.recorded_rules import recorded_problems
from megatron_rl.planning.replay_rules import replay_problems
from megatron_rl.planning.resume_rules import resume_problems

ARCHITECTURES: dict[StartsFrom, Mapping[str, Family]] = {
    StartsFrom.LANGUAGE_MODEL: FAMILIES,
    StartsFrom.CLASSIFIER: REWARD_FAMILIES,
    StartsFrom.EITHER: STARTING_POINTS,
}
"""The supported architectures of each kind of model."""


def preflight(config: RunConfig, *, config_only: bool = False, folders: ModelFolders | None = None) -> list[Violation]:
    """All violations, each with the values, the rule and the nearest valid choice; an empty list if the run can start.

    config_only: model folders need nothing but config.json, and data files need not exist. folders: by path, as they
    were read before; None: those of the roles.
    """
    return examined(config, config_only=config_only, folders=folders)[0]


def examined(
    config: RunConfig, *, config_only: bool = False, folders: ModelFolders | None = None
) -> tuple[list[Violation], list[str]]:
    """Violations as `preflight` returns them, and one line for each part of a model folder that is unpacked, or ignored
    though it may be there on purpose.
    """
    # Other rules look at these paths, and count with these numbers.
    unusable = [*magnitude_problems(config), *path_problems(config)]
    if unusable:
        return without_echoes([*value_problems(config), *unusable], followed_keys(config)), []
    folders = model_folders(config) if folders is None else folders
    models, problems = read_models(config, folders, config_only=config_only)
    violations = _violations(config, folders, models, problems, config_only)
    notes = [note for model in models for note in (_unread(config, model), model.unpacked) if note is not None]
    return violations, notes


def _unread(config: RunConfig, model: ModelSizes) -> str | None:
    """The line about a folder's tensors that are not read, some of which drafts or images read."""
    shared = config.actor_rollout_ref
    is_own = config.generates and model.path == shared.model.path
    if model.unread is None or not is_own:
        return model.unread
    read = ["; speculative decoding reads those of the layer"] if shared.mtp_use != MTPUse.NONE else []
    if config.data.image_key is not None:
        trains_tower = not shared.actor.megatron.freeze_vision_model
        change = "updates change them" if trains_tower else "no update changes them"
        read.append(f"; the pass over images reads those of the tower, and {change}")
    return model.unread + "".join(read)


def _violations(
    config: RunConfig,
    folders: ModelFolders,
    models: list[ModelSizes],
    problems: list[Violation],
    config_only: bool,
) -> list[Violation]:
    """problems: violations of the model folders."""
    pools = countable_pools(config)
    if not config.generates:
        violations = [*value_problems(config), *problems, *_task_problems(config, folders, pools, models, config_only)]
        return without_echoes(violations, followed_keys(config))
    return without_echoes(
        [
            *value_problems(config),
            *(() if config_only else file_problems(config)),
            *algorithm_problems(config),
            *async_problems(config),
            *recorded_problems(config, config_only=config_only),
            *problems,
            *pool_problems(config),
            *layout_problems(pools, models),
            *hardware_problems(config.trainer.hardware_file),
            *feature_problems(config, models),
            *option_problems(config, models, config_only=config_only),
            *lora_problems(config, models, config_only=config_only),
            *sharing_problems(config, pools),
            *image_problems(config, pools, models),
            *rollout_problems(config, pools, models),
            *engine_problems(config, models),
            *quantization_problems(config, models),
            *draft_problems(config, config_only=config_only),
            *shared_prompt_problems(config, models),
            *distillation_problems(config, folders),
            *replay_problems(config),
            *_batch_problems(config),
            *length_problems(config, models),
            *cache_problems(config, models),
            *pretraining_problems(config, models, config_only=config_only),
            *resume_problems(config, folders),
        ],
        followed_keys(config),
    )


def _task_problems(
    config: RunConfig,
    folders: ModelFolders,
    pools: list[PoolSpec],
    models: list[ModelSizes],
    config_only: bool,
) -> Iterable[Violation]:
    """Rules of a task without generation: none of rollouts, rewards and algorithms."""
    if not config_only:
        yield from file_problems(config)
    yield from pool_problems(config)
    yield from layout_problems(pools, models)
    yield from image_problems(config, pools, models)
    yield from hardware_problems(config.trainer.hardware_file)
    yield from feature_problems(config, models)
    yield from option_problems(config, models, config_only=config_only)
    yield from lora_problems(config, models, config_only=config_only)
    yield from sharing_problems(config, pools)
    yield from task_length_problems(config, models)
    yield from preference_problems(config)
    yield from resume_problems(config, folders)


def read_models(
    config: RunConfig, folders: ModelFolders | None = None, *, config_only: bool = False
) -> tuple[list[ModelSizes], list[Violation]]:
    """Sizes of the models that roles start from, each once and the actor's first, and violations of their folders.

    Models that cannot be read are left out.
    """
    folders = model_folders(config) if folders is None else folders
    actor_path, sizes_read = config.actor_rollout_ref.model.path, {}
    problems: list[Violation] = []
    for role in roles_of(config):
        if role.kind.may_read_text and role.model_path is not None:
            actor, model = folders[actor_path], folders[role.model_path]
            problems += reading_problems(actor, role, model, config_only=config_only)
        read = (role.model_path, role.kind.starts_from is StartsFrom.CLASSIFIER)
        if role.model_path is None or read in sizes_read:
            continue
        sizes_read[read], faults = read_model_folder(
            role.model_key, folders[role.model_path], ARCHITECTURES[role.kind.starts_from], config_only=config_only
        )
        problems += faults
        sizes = sizes_read[read]
        if (role.kind.is_sampled or role.kind.judges) and sizes is not None and not config_only:
            problems += end_token_problems(role.model_key, folders[role.model_path], sizes.vocab_size)
    return list({model.path: model for model in sizes_read.values() if model is not None}.values()), problems


def _batch_problems(config: RunConfig) -> Iterable[Violation]:
    rollout = config.actor_rollout_ref.rollout
    if 1 <= rollout.max_num_batched_tokens < rollout.max_num_seqs:
        key = f"{ROLLOUT}.max_num_batched_tokens"
        rule = f"must be >= max_num_seqs={rollout.max_num_seqs}"
        yield Violation({key: rollout.max_num_batched_tokens}, rule, {key: rollout.max_num_seqs})
