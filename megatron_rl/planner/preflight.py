"""Every rule a run must keep that needs only its configuration, the model's config.json and the file system.

Runs before any process is started and loads neither torch nor Ray, so that a mistake costs a second, not a minute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.config.algorithms import uses_critic
from megatron_rl.config.problems import nearest_file, nearest_number, raise_problems
from megatron_rl.config.schema import LAYOUT_KEYS, DataConfig, MegatronConfig, RunConfig, as_list
from megatron_rl.config.validate import ACTOR, CRITIC, REF, ROLLOUT, is_path_or_paths, value_problems
from megatron_rl.planner.algorithm_rules import algorithm_problems
from megatron_rl.planner.expert_layout import expert_problems
from megatron_rl.planner.model_folder import STARTING_POINTS, ModelSizes, read_model_folder
from megatron_rl.planner.resume_rules import resume_problems
from megatron_rl.planner.stage_rules import SHARES, pp_sizes, stage_problems

PROMPT_SUFFIXES = (".parquet", ".jsonl")


def check_preflight(config: RunConfig) -> None:
    """Raise one ConfigError that lists every violation."""
    raise_problems("this run cannot start", preflight(config))


def preflight(config: RunConfig) -> list[str]:
    """All violations, each with the values, the rule and the nearest valid choice; empty when the run can start."""
    actor_path, critic_path = config.actor_rollout_ref.model.path, config.critic.model.path
    actor_model, problems = read_model_folder("actor_rollout_ref.model.path", actor_path)
    models = [actor_model]
    if uses_critic(config) and critic_path != actor_path:
        critic_model, critic_problems = read_model_folder("critic.model.path", critic_path, STARTING_POINTS)
        problems += critic_problems
        models.append(critic_model)
    vocab_multiple = config.actor_rollout_ref.actor.megatron.make_vocab_size_divisible_by
    known_models = [model.padded_to(vocab_multiple) for model in models if model is not None]
    return [
        *value_problems(config),
        *_file_problems(config),
        *algorithm_problems(config),
        *problems,
        *_layout_problems(config, known_models),
        *expert_problems(config, known_models),
        *_role_problems(config),
        *_rollout_problems(config, known_models),
        *_batch_problems(config),
        *_length_problems(config, known_models),
        *resume_problems(config),
    ]


def _file_problems(config: RunConfig) -> Iterable[str]:
    data, reward = config.data, config.custom_reward_function
    files = [(key, path, PROMPT_SUFFIXES) for key, paths in prompt_files(data) for path in paths]
    if reward.path is not None:
        files.append(("custom_reward_function.path", reward.path, (".py",)))
    for key, path, suffixes in files:
        file = Path(path).expanduser()
        kind = " or ".join(suffixes)
        if not file.is_file():
            yield f"{key}={path} must be a {kind} file, and there is none; {nearest_file(file, suffixes)}"
        elif file.suffix not in suffixes:
            yield f"{key}={path} must be a {kind} file, by its name; nearest: {file.with_suffix(suffixes[0])}"
    trainer = config.trainer
    for key, path in (
        ("trainer.default_local_dir", trainer.default_local_dir),
        ("trainer.rollout_data_dir", trainer.rollout_data_dir),
        ("trainer.validation_data_dir", trainer.validation_data_dir),
    ):
        if path is not None and Path(path).exists() and not Path(path).is_dir():
            yield f"{key}={path} must be a folder, and it is a file; nearest: {path}.run"


def prompt_files(data: DataConfig) -> list[tuple[str, list[str]]]:
    """(key, paths) of training and held-out prompts; no paths where the value is none, which has its own rule."""
    values = (("data.train_files", data.train_files), ("data.val_files", data.val_files))
    return [(key, as_list(files)) for key, files in values if is_path_or_paths(files)]


@dataclass(frozen=True)
class Layouts:
    """The TP and PP sizes that fit all models and the number of ranks; `megatron` shares layers out among stages."""

    world_size: int
    models: list[ModelSizes]
    megatron: MegatronConfig = field(default_factory=MegatronConfig)

    @property
    def tp_sizes(self) -> list[int]:
        """TP sizes that divide everything TP cuts."""
        return _divisors(math.gcd(*(model.max_tp for model in self.models)) or self.world_size)

    @property
    def pp_sizes(self) -> list[int]:
        """PP sizes that divide the ranks and over which the layers spread."""
        return pp_sizes(self.models, self.megatron, self.world_size)

    def nearest(self, tp_size: int, pp_size: int) -> tuple[int, int]:
        """The valid (tp, pp) that is the fewest doublings and halvings away."""
        valid = [(t, p) for t in self.tp_sizes for p in self.pp_sizes if self.world_size % (t * p) == 0]
        return min(valid, key=lambda pair: abs(math.log2(pair[0] / tp_size)) + abs(math.log2(pair[1] / pp_size)))


def _layout_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[str]:
    """TP and PP against the ranks and the models; sizes below 1 are another rule's business."""
    megatron, trainer = config.actor_rollout_ref.actor.megatron, config.trainer
    tp_size, pp_size = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    shares = [share for share in (getattr(megatron, key) for key in SHARES) if share is not None]
    if min(tp_size, pp_size, trainer.nnodes, trainer.n_gpus_per_node, *shares) < 1:
        return
    layouts = Layouts(trainer.nnodes * trainer.n_gpus_per_node, models, megatron)
    if layouts.world_size % (tp_size * pp_size):
        tp, pp = layouts.nearest(tp_size, pp_size)
        yield (
            f"tp({tp_size}) * pp({pp_size}) must divide the {layouts.world_size} ranks (trainer.nnodes="
            f"{trainer.nnodes} * trainer.n_gpus_per_node={trainer.n_gpus_per_node}); nearest: tp({tp}) * pp({pp})"
        )
    for model in models:
        for name, size in model.tp_divides.items():
            if size % tp_size:
                nearest = nearest_number(tp_size, layouts.tp_sizes)
                yield f"tp({tp_size}) must divide {name}({size}) of {model.path}; nearest: tp({nearest})"
    yield from stage_problems(models, megatron, layouts.world_size)


def _role_problems(config: RunConfig) -> Iterable[str]:
    """The roles share one grid of processes."""
    actor = config.actor_rollout_ref.actor.megatron
    if actor.param_offload:
        yield (
            f"{ACTOR}.megatron.param_offload=true: generation reads the actor's parameters; nearest: false, with "
            f"{ROLLOUT}.drop_train_weights=true where rollout TP is below training TP"
        )
    followers = [(CRITIC, config.critic.megatron)] if uses_critic(config) else []
    for role, megatron in (*followers, (REF, config.actor_rollout_ref.ref.megatron)):
        for name in LAYOUT_KEYS:
            ours, theirs = getattr(megatron, name), getattr(actor, name)
            if ours != theirs:
                yield (
                    f"{role}.megatron.{name}={ours} must equal {ACTOR}.megatron.{name}={theirs}, because all roles "
                    f"share one grid of processes; nearest: {theirs}"
                )


def _rollout_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[str]:
    """Rollout TP against the ranks, the actor's model and training TP."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    tp_size, world_size = rollout.tensor_model_parallel_size, trainer.nnodes * trainer.n_gpus_per_node
    train_tp = config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size
    if min(tp_size, train_tp, world_size) < 1:
        return
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    model = next((model for model in models if model.path == config.actor_rollout_ref.model.path), None)
    fitting = [size for size in _divisors(world_size) if model is None or not _rollout_misfits(model, size)]
    # A rollout TP that is training's is refused by training's rules, and one message is enough.
    if world_size % tp_size and tp_size != train_tp:
        yield f"{key}={tp_size} must divide the {world_size} ranks; nearest: {nearest_number(tp_size, fitting)}"
    misfits = {} if model is None else _rollout_misfits(model, tp_size)
    for name, rule in misfits.items():
        if tp_size != train_tp or name not in model.tp_divides:
            yield f"{key}={tp_size} must {rule} of {model.path}; nearest: {nearest_number(tp_size, fitting)}"
    if rollout.drop_train_weights and train_tp % tp_size:
        yield (
            f"{ROLLOUT}.drop_train_weights=true needs training shards inside rollout shards, so {key}={tp_size} must "
            f"divide training tp({train_tp}); nearest: {nearest_number(tp_size, _divisors(train_tp))}"
        )


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


def _batch_problems(config: RunConfig) -> Iterable[str]:
    batch = config.data.train_batch_size
    trained = [(ACTOR, config.actor_rollout_ref.actor.ppo_mini_batch_size)]
    if uses_critic(config):
        trained.append((CRITIC, config.critic.ppo_mini_batch_size))
    for role, mini_batch in trained:
        if batch >= 1 and mini_batch >= 1 and batch % mini_batch:
            nearest = nearest_number(mini_batch, _divisors(batch))
            yield (
                f"{role}.ppo_mini_batch_size={mini_batch} must divide data.train_batch_size={batch}; nearest: {nearest}"
            )
    rollout = config.actor_rollout_ref.rollout
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield (
            f"{ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} must be >= max_num_seqs="
            f"{rollout.max_num_seqs}; nearest: {rollout.max_num_seqs}"
        )


def _length_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[str]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    for model in models:
        for name, limit in model.longest.items():
            if prompt + response > limit:
                key, room = ("response", limit - prompt) if prompt < limit else ("prompt", max(1, limit - response))
                yield (
                    f"data.max_prompt_length={prompt} + data.max_response_length={response} must be <= "
                    f"{name}({limit}) of {model.path}; nearest: data.max_{key}_length={room}"
                )
    if len({model.vocab_size for model in models}) > 1:
        sizes = ", ".join(f"{model.vocab_size} of {model.path}" for model in models)
        yield f"actor and critic read the same tokens, so their vocab_size must be equal: {sizes}; nearest: one model"


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
