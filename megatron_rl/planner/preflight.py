"""Every rule a run must keep that needs only its configuration, the model's config.json and the file system.

Runs before any process is started and loads neither torch nor Ray, so that a mistake costs a second, not a minute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from megatron_rl.config.algorithms import uses_critic, uses_reference
from megatron_rl.config.load import follows
from megatron_rl.config.megatron import LAYOUT_KEYS, MegatronConfig
from megatron_rl.config.problems import divisors, nearest_number, raise_problems, without_echoes
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.validate import ACTOR, CRITIC, MOST_RANKS, REF, REWARD_MODEL, ROLLOUT, value_problems
from megatron_rl.errors import Violation, shown
from megatron_rl.model.families import REWARD_FAMILIES
from megatron_rl.planner.algorithm_rules import algorithm_problems
from megatron_rl.planner.cache_rules import cache_problems
from megatron_rl.planner.engine_rules import CPU_TP_SIZES, engine_problems, engine_tp_sizes
from megatron_rl.planner.expert_layout import expert_problems
from megatron_rl.planner.file_rules import file_problems, path_problems
from megatron_rl.planner.folder_files import end_token_problems
from megatron_rl.planner.model_folder import STARTING_POINTS, ModelSizes, read_model_folder
from megatron_rl.planner.recompute_rules import recompute_problems
from megatron_rl.planner.resume_rules import resume_problems
from megatron_rl.planner.stage_rules import SHARES, pp_sizes, stage_problems
from megatron_rl.planner.vocabulary import vocabulary_problems

TP, PP = f"{ACTOR}.megatron.tensor_model_parallel_size", f"{ACTOR}.megatron.pipeline_model_parallel_size"


def check_preflight(config: RunConfig) -> None:
    """Raise one ConfigError that lists every violation."""
    raise_problems("this run cannot start", preflight(config))


def preflight(config: RunConfig, *, config_only: bool = False) -> list[Violation]:
    """All violations, each with the values, the rule and the nearest valid choice; empty when the run can start.

    config_only: of the model folders nothing but config.json need be there, and of data nothing.
    """
    unreachable = list(path_problems(config))
    if unreachable:
        return without_echoes([*value_problems(config), *unreachable], follows())
    models, problems = read_models(config, config_only=config_only)
    trainer = config.trainer
    countable = max(trainer.nnodes, trainer.n_gpus_per_node) <= MOST_RANKS
    return without_echoes(
        [
            *value_problems(config),
            *(() if config_only else file_problems(config)),
            *algorithm_problems(config),
            *problems,
            *(_layout_problems(config, models) if countable else ()),
            *(expert_problems(config, models) if countable else ()),
            *recompute_problems(config, models),
            *_role_problems(config),
            *(_rollout_problems(config, models) if countable else ()),
            *engine_problems(config, models),
            *_batch_problems(config),
            *_pack_problems(config),
            *_length_problems(config, models),
            *cache_problems(config, models),
            *resume_problems(config),
        ],
        follows(),
    )


def read_models(config: RunConfig, *, config_only: bool = False) -> tuple[list[ModelSizes], list[Violation]]:
    """Sizes of the actor's model and of others that critic and reward model start from, and their folders' faults.

    Models that cannot be read are left out.
    """
    shared, critic_path = config.actor_rollout_ref, config.critic.model.path
    model, problems = read_model_folder("actor_rollout_ref.model.path", shared.model.path, config_only=config_only)
    models = [model]
    if model is not None and not config_only:
        problems += end_token_problems("actor_rollout_ref.model.path", shared.model.path)
    if uses_critic(config) and critic_path != shared.model.path:
        key = "critic.model.path"
        model, critic_problems = read_model_folder(key, critic_path, STARTING_POINTS, config_only=config_only)
        problems += critic_problems
        models.append(model)
    reward_path = config.reward_model.model.path
    if config.reward_model.enable and reward_path is not None:
        key = f"{REWARD_MODEL}.model.path"
        model, reward_problems = read_model_folder(key, reward_path, REWARD_FAMILIES, config_only=config_only)
        problems += [*reward_problems, *vocabulary_problems(shared.model.path, reward_path)]
        models.append(model)
    return [model for model in models if model is not None], problems


@dataclass(frozen=True)
class Layouts:
    """The TP and PP sizes that fit all models and the number of ranks; `megatron` shares layers out among stages."""

    world_size: int
    models: list[ModelSizes]
    megatron: MegatronConfig = field(default_factory=MegatronConfig)

    @property
    def tp_sizes(self) -> list[int]:
        """TP sizes that divide everything TP cuts."""
        return divisors(math.gcd(*(model.max_tp for model in self.models)) or self.world_size)

    @property
    def pp_sizes(self) -> list[int]:
        """PP sizes that divide the ranks and over which the layers spread."""
        return pp_sizes(self.models, self.megatron, self.world_size)

    def nearest(self, tp_size: int, pp_size: int) -> tuple[int, int]:
        """The valid (tp, pp) that is the fewest doublings and halvings away."""
        valid = [(t, p) for t in self.tp_sizes for p in self.pp_sizes if self.world_size % (t * p) == 0]
        return min(valid, key=lambda pair: abs(math.log2(pair[0] / tp_size)) + abs(math.log2(pair[1] / pp_size)))


def _layout_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """TP and PP against the ranks and the models; sizes below 1 are another rule's business."""
    megatron, trainer = config.actor_rollout_ref.actor.megatron, config.trainer
    tp_size, pp_size = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    shares = [share for share in (getattr(megatron, key) for key in SHARES) if share is not None]
    if min(tp_size, pp_size, trainer.nnodes, trainer.n_gpus_per_node, *shares) < 1:
        return
    layouts = Layouts(trainer.nnodes * trainer.n_gpus_per_node, models, megatron)
    tp, pp = layouts.nearest(tp_size, pp_size)
    nearest = ({TP: tp} if tp != tp_size else {}) | ({PP: pp} if pp != pp_size else {})
    if layouts.world_size % (tp_size * pp_size):
        rule = (
            f"must divide the {layouts.world_size} ranks (trainer.nnodes={trainer.nnodes} * "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node})"
        )
        yield Violation({TP: tp_size, PP: pp_size}, rule, nearest, subject=f"tp({tp_size}) * pp({pp_size})")
    for model in models:
        for name, size in model.tp_divides.items():
            if size % tp_size:
                rule = f"must divide {name}({size}) of {model.path}"
                yield Violation({TP: tp_size}, rule, nearest, subject=f"tp({tp_size})")
    stages = layouts.world_size // tp_size if layouts.world_size % tp_size == 0 else layouts.world_size
    yield from stage_problems(models, megatron, stages)


def _role_problems(config: RunConfig) -> Iterable[Violation]:
    """The roles share one grid of processes."""
    actor = config.actor_rollout_ref.actor.megatron
    if actor.param_offload:
        key = f"{ACTOR}.megatron.param_offload"
        hint = f"{ROLLOUT}.drop_train_weights=true saves memory where rollout TP is below training TP"
        yield Violation({key: True}, "must be false: generation reads the actor's parameters", {key: False}, hint)
    followers = [(CRITIC, config.critic.megatron)] if uses_critic(config) else []
    if config.reward_model.enable:
        followers.append((REWARD_MODEL, config.reward_model.megatron))
    for role, megatron in (*followers, (REF, config.actor_rollout_ref.ref.megatron)):
        for name in LAYOUT_KEYS:
            ours, theirs = getattr(megatron, name), getattr(actor, name)
            if ours != theirs:
                key = f"{role}.megatron.{name}"
                rule = (
                    f"must equal {ACTOR}.megatron.{name}={shown(theirs)}, because all roles share one grid of processes"
                )
                yield Violation({key: ours}, rule, {key: theirs})


def _rollout_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """Rollout TP against the ranks, the actor's model and training TP."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    tp_size, world_size = rollout.tensor_model_parallel_size, trainer.nnodes * trainer.n_gpus_per_node
    train_tp = config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size
    if min(tp_size, train_tp, world_size) < 1:
        return
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    model = next((model for model in models if model.path == config.actor_rollout_ref.model.path), None)
    fitting = [size for size in divisors(world_size) if model is None or not _rollout_misfits(model, size)]
    if rollout.drop_train_weights:
        fitting = [size for size in fitting if train_tp % size == 0]
    fitting = engine_tp_sizes(trainer.device, fitting)
    nearest = {key: nearest_number(tp_size, fitting or [1])}
    if not engine_tp_sizes(trainer.device, [tp_size]):
        sizes = ", ".join(map(str, CPU_TP_SIZES))
        yield Violation({key: tp_size}, f"must be one of {sizes} on trainer.device=cpu, as vLLM's all-reduce", nearest)
    # A rollout TP that is training's is refused by training's rules, and one message is enough.
    if world_size % tp_size and tp_size != train_tp:
        yield Violation({key: tp_size}, f"must divide the {world_size} ranks", nearest)
    misfits = {} if model is None else _rollout_misfits(model, tp_size)
    for name, rule in misfits.items():
        if tp_size != train_tp or name not in model.tp_divides:
            yield Violation({key: tp_size}, f"must {rule} of {model.path}", nearest)
    if rollout.drop_train_weights and train_tp % tp_size:
        rule = (
            f"must divide training tp({train_tp}), as drop_train_weights=true needs training shards inside of its own"
        )
        yield Violation({key: tp_size}, rule, nearest)


def _rollout_misfits(model: ModelSizes, tp_size: int) -> dict[str, str]:
    """What of the model a rollout TP size does not fit, by name; fewer key/value heads than ranks are repeated."""
    heads = model.num_key_value_heads
    found = {
        name: f"divide {name}({size})"
        for name, size in model.rollout_tp_divides.items()
        if size % tp_size and name != "num_key_value_heads"
    }
    if heads % tp_size and tp_size % heads:
        found["num_key_value_heads"] = f"divide or be a multiple of num_key_value_heads({heads})"
    return found


def _batch_problems(config: RunConfig) -> Iterable[Violation]:
    rollout = config.actor_rollout_ref.rollout
    if 1 <= rollout.max_num_batched_tokens < rollout.max_num_seqs:
        key = f"{ROLLOUT}.max_num_batched_tokens"
        rule = f"must be >= max_num_seqs={rollout.max_num_seqs}"
        yield Violation({key: rollout.max_num_batched_tokens}, rule, {key: rollout.max_num_seqs})


def _pack_problems(config: RunConfig) -> Iterable[Violation]:
    """The longest sequence must fit into one pass."""
    shared, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    limits = [
        (f"{ACTOR}.ppo_max_token_len_per_gpu", shared.actor.use_dynamic_bsz),
        (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", shared.rollout.log_prob_use_dynamic_bsz),
        (f"{REF}.log_prob_max_token_len_per_gpu", shared.ref.log_prob_use_dynamic_bsz and uses_reference(config)),
        (f"{CRITIC}.ppo_max_token_len_per_gpu", critic.use_dynamic_bsz and uses_critic(config)),
        (f"{CRITIC}.forward_max_token_len_per_gpu", critic.use_dynamic_bsz and uses_critic(config)),
        (f"{REWARD_MODEL}.forward_max_token_len_per_gpu", reward.use_dynamic_bsz and reward.enable),
    ]
    lengths = (config.data.max_prompt_length, config.data.max_response_length)
    for key, is_used in limits:
        limit = attrgetter(key)(config)
        if is_used and min(*lengths, limit) >= 1 and limit < sum(lengths):
            rule = f"must be >= data.max_prompt_length + data.max_response_length = {sum(lengths)}"
            yield Violation({key: limit}, rule, {key: sum(lengths)})


def _length_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    keys = {"data.max_prompt_length": prompt, "data.max_response_length": response}
    for model in models:
        for name, limit in model.longest.items():
            if min(prompt, response) >= 1 and prompt + response > limit:
                key, room = ("response", limit - prompt) if prompt < limit else ("prompt", limit - response)
                rule = f"must be <= {name}({limit}) of {model.path}"
                nearest = {f"data.max_{key}_length": room}
                if room < 1:
                    nearest = {"data.max_prompt_length": limit - limit // 2, "data.max_response_length": limit // 2}
                subject = f"data.max_prompt_length={prompt} + data.max_response_length={response}"
                yield Violation(keys, rule, nearest, subject=subject)
    if len({model.vocab_size for model in models}) > 1:
        sizes = ", ".join(f"{model.vocab_size} of {model.path}" for model in models)
        rule = f"and the actor's read the same tokens, so their vocab_size must be equal: {sizes}"
        yield from _other_vocabularies(config, models, rule)


def _other_vocabularies(config: RunConfig, models: list[ModelSizes], rule: str) -> Iterable[Violation]:
    """One for each role whose vocabulary is not of the actor's size."""
    actor_path, sizes = config.actor_rollout_ref.model.path, {model.path: model.vocab_size for model in models}
    roles = {
        "critic.model.path": config.critic.model.path,
        f"{REWARD_MODEL}.model.path": config.reward_model.model.path,
    }
    for key, path in roles.items():
        if actor_path in sizes and path in sizes and sizes[path] != sizes[actor_path]:
            # A language model gives no rewards.
            nearest = {key: actor_path} if key.startswith(CRITIC) else {}
            yield Violation({key: path}, rule, nearest)
