"""Every rule a run must keep that needs only its configuration, the model's config.json and the file system.

Runs before any process is started and loads neither torch nor Ray, so that a mistake costs a second, not a minute.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.config.keys import ROLLOUT, followed_keys, value_of
from megatron_rl.config.problems import raise_problems, without_echoes
from megatron_rl.config.roles import ACTOR, CRITIC, REWARD_MODEL, SCORER, PoolSpec, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.single_values import magnitude_problems
from megatron_rl.config.tasks import WITHOUT_ROLLOUT
from megatron_rl.config.validate import value_problems
from megatron_rl.errors import Violation
from megatron_rl.ledger.planner.algorithm_rules import algorithm_problems
from megatron_rl.ledger.planner.async_rules import async_problems
from megatron_rl.ledger.planner.cache_rules import cache_problems
from megatron_rl.ledger.planner.engine_rules import engine_problems
from megatron_rl.ledger.planner.file_rules import file_problems, hardware_problems, path_problems, stage_file_problems
from megatron_rl.ledger.planner.folder_files import end_token_problems
from megatron_rl.ledger.planner.layout_rules import layout_problems, rollout_problems, sharing_problems
from megatron_rl.ledger.planner.model_folder import STARTING_POINTS, ModelSizes, read_model_folder
from megatron_rl.ledger.planner.option_rules import option_problems
from megatron_rl.ledger.planner.pool_rules import countable_pools, pool_problems
from megatron_rl.ledger.planner.pretraining_rules import pretraining_problems
from megatron_rl.ledger.planner.replay_rules import replay_problems
from megatron_rl.ledger.planner.resume_rules import resume_problems
from megatron_rl.ledger.planner.reward_rules import statistics_problems
from megatron_rl.ledger.planner.task_lengths import stage_length_problems
from megatron_rl.ledger.planner.vocabulary import reading_problems
from megatron_rl.model.families import FAMILIES, REWARD_FAMILIES

LIMIT = "max_position_embeddings"
OVERRIDE = f"actor_rollout_ref.model.override_config.{LIMIT}"
STARTING_FROM = {CRITIC: STARTING_POINTS, SCORER: STARTING_POINTS, REWARD_MODEL: REWARD_FAMILIES}
"""Kind of role -> architectures that it can start from; of the others language models."""


def check_preflight(config: RunConfig) -> None:
    """Raise one ConfigError that lists every violation."""
    raise_problems("this run cannot start", preflight(config))


def preflight(config: RunConfig, *, config_only: bool = False) -> list[Violation]:
    """All violations, each with the values, the rule and the nearest valid choice; empty when the run can start.

    config_only: of the model folders nothing but config.json need be there, and of data nothing.
    """
    return examined(config, config_only=config_only)[0]


def examined(config: RunConfig, *, config_only: bool = False) -> tuple[list[Violation], list[str]]:
    """Violations as `preflight` returns them, and a line for each part of a model folder that is not read though it may
    have been meant.
    """
    # Other rules look at these paths, and count with these numbers.
    unusable = [*magnitude_problems(config), *path_problems(config)]
    if unusable:
        return without_echoes([*value_problems(config), *unusable], followed_keys(config)), []
    models, problems = read_models(config, config_only=config_only)
    violations = _violations(config, models, problems, config_only)
    return violations, [model.unread for model in models if model.unread is not None]


def _violations(
    config: RunConfig, models: list[ModelSizes], problems: list[Violation], config_only: bool
) -> list[Violation]:
    """problems: those of the models' folders."""
    pools = countable_pools(config)
    if config.trainer.stage in WITHOUT_ROLLOUT:
        found = [*problems, *_stage_problems(config, pools, models, config_only)]
        return without_echoes([*value_problems(config), *found], followed_keys(config))
    return without_echoes(
        [
            *value_problems(config),
            *(() if config_only else (*file_problems(config), *statistics_problems(config))),
            *algorithm_problems(config),
            *async_problems(config),
            *problems,
            *pool_problems(config),
            *layout_problems(pools, models),
            *hardware_problems(config.trainer.hardware_file),
            *option_problems(config, models),
            *sharing_problems(config, pools),
            *rollout_problems(config, pools, models),
            *engine_problems(config, models),
            *replay_problems(config, models),
            *_batch_problems(config),
            *_pack_problems(config),
            *_length_problems(config, models),
            *cache_problems(config, models),
            *pretraining_problems(config, models, config_only=config_only),
            *resume_problems(config),
        ],
        followed_keys(config),
    )


def _stage_problems(
    config: RunConfig, pools: list[PoolSpec], models: list[ModelSizes], config_only: bool
) -> Iterable[Violation]:
    """Of a stage that does not generate: without the rules of rollouts, rewards and algorithms."""
    if not config_only:
        yield from stage_file_problems(config)
    yield from pool_problems(config)
    yield from layout_problems(pools, models)
    yield from hardware_problems(config.trainer.hardware_file)
    yield from option_problems(config, models)
    yield from sharing_problems(config, pools)
    yield from stage_length_problems(config, models)
    yield from resume_problems(config)


def read_models(config: RunConfig, *, config_only: bool = False) -> tuple[list[ModelSizes], list[Violation]]:
    """Sizes of the actor's model and of others that critic and reward models start from, and their folders' faults.

    Models that cannot be read are left out; of the others each is there once, the actor's first.
    """
    actor_path, found = config.actor_rollout_ref.model.path, {}
    problems: list[Violation] = []
    for role in roles_of(config):
        if role.kind == REWARD_MODEL and role.model_path is not None:
            problems += reading_problems(actor_path, role, config_only=config_only)
        read = (role.model_path, role.kind == REWARD_MODEL)
        if role.model_path is None or read in found or (role.kind == CRITIC and role.model_path == actor_path):
            continue
        found[read], faults = read_model_folder(
            role.model_key, role.model_path, STARTING_FROM.get(role.kind, FAMILIES), config_only=config_only
        )
        problems += faults
        sizes = found[read]
        if role.kind == ACTOR and sizes is not None and not config_only:
            problems += end_token_problems(role.model_key, actor_path, sizes.vocab_size)
    return list({model.path: model for model in found.values() if model is not None}.values()), problems


def _batch_problems(config: RunConfig) -> Iterable[Violation]:
    rollout = config.actor_rollout_ref.rollout
    if 1 <= rollout.max_num_batched_tokens < rollout.max_num_seqs:
        key = f"{ROLLOUT}.max_num_batched_tokens"
        rule = f"must be >= max_num_seqs={rollout.max_num_seqs}"
        yield Violation({key: rollout.max_num_batched_tokens}, rule, {key: rollout.max_num_seqs})


def _pack_problems(config: RunConfig) -> Iterable[Violation]:
    """The longest sequence must fit into one pass, over all ranks that share it."""
    lengths = (config.data.max_prompt_length, config.data.max_response_length)
    passes = [(one, role) for role in roles_of(config) for one in role.passes if one.max_tokens is not None]
    sizes = {one.key: role.megatron.context_parallel_size for one, role in passes}
    for key, own in dict.fromkeys((one.key, one.longest) for one, _ in passes):
        # The configured limit: a pass makes room for what its role reads beyond the longest sequence.
        limit, longest, what = value_of(config, key), sum(lengths), "data.max_prompt_length + data.max_response_length"
        if own not in (None, longest):
            longest, what = own, f"{key.rpartition('.')[0]}.max_length"
        if min(*lengths, limit, longest, sizes[key]) >= 1 and limit * sizes[key] < longest:
            shared = f" / cp({sizes[key]})" if sizes[key] > 1 else ""
            whole = f"({what})" if shared else what
            rule = f"must be >= {whole}{shared} = {longest}{shared}"
            yield Violation({key: limit}, rule, {key: -(-longest // sizes[key])})


def _length_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    keys = {"data.max_prompt_length": prompt, "data.max_response_length": response}
    override = config.actor_rollout_ref.model.override_config.max_position_embeddings
    of_tokens = {role.model_path for role in roles_of(config) if not role.reads_text}
    yield from _text_length_problems(config, models)
    models = [model for model in models if model.path in of_tokens]
    for model in models:
        told = {} if override is None else {OVERRIDE: override}
        for name, limit in ((told or model.longest) | model.windows).items():
            if min(prompt, response) >= 1 and prompt + response > limit:
                key, room = ("response", limit - prompt) if prompt < limit else ("prompt", limit - response)
                rule = f"must be <= {name}({limit}) of {model.path}"
                hint = f"{OVERRIDE} is for models that are trained beyond it" if name == LIMIT else ""
                nearest = {f"data.max_{key}_length": room}
                if room < 1:
                    nearest = {"data.max_prompt_length": limit - limit // 2, "data.max_response_length": limit // 2}
                subject = f"data.max_prompt_length={prompt} + data.max_response_length={response}"
                yield Violation(keys, rule, nearest, hint, subject=subject)
    if len({model.vocab_size for model in models}) > 1:
        sizes = ", ".join(f"{model.vocab_size} of {model.path}" for model in models)
        rule = f"and the actor's read the same tokens, so their vocab_size must be equal: {sizes}"
        yield from _other_vocabularies(config, models, rule)


def _text_length_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """Of reward models that tokenise conversations anew."""
    by_path = {model.path: model for model in models}
    for role in roles_of(config):
        model, longest = by_path.get(role.model_path), role.score.longest if role.score is not None else None
        if model is None or longest is None:
            continue
        key = f"{role.key}.max_length"
        for name, limit in model.longest.items():
            if longest > limit:
                rule = f"must be <= {name}({limit}) of {model.path}"
                if role.settings.max_length is None:
                    rule += f"; null is data.max_prompt_length + data.max_response_length = {longest}"
                yield Violation({key: role.settings.max_length}, rule, {key: limit})


def _other_vocabularies(config: RunConfig, models: list[ModelSizes], rule: str) -> Iterable[Violation]:
    """One for each role whose vocabulary is not of the actor's size."""
    actor_path, sizes = config.actor_rollout_ref.model.path, {model.path: model.vocab_size for model in models}
    for role in roles_of(config):
        key, path = role.model_key, role.model_path
        if (
            role.has_value_head
            and not role.reads_text
            and {actor_path, path} <= sizes.keys()
            and sizes[path] != sizes[actor_path]
        ):
            # A language model gives no rewards, but a reward model can read text.
            nearest = {key if role.kind == CRITIC else f"{role.key}.model.input_tokenizer": actor_path}
            yield Violation({key: path}, rule, nearest)
