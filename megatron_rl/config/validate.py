"""The rules a single value must keep, as tables. Rules between values, and with files, are in `planner.preflight`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_rl.config.algorithms import KL_TYPES, LOSS_AGG_MODES, uses_rule
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.schema import RunConfig, as_list
from megatron_rl.errors import Violation, shown

ACTOR, ROLLOUT, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "critic"
REWARD_MODEL = "reward_model"
CORRECTION = "algorithm.rollout_correction"

CHOICES: dict[str, tuple[str, ...]] = {
    "data.truncation": ("error", "left", "right", "middle"),
    "trainer.device": ("cpu", "cuda"),
    "trainer.logger": ("console", "jsonl", "tensorboard"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.kl_penalty": KL_TYPES,
    "algorithm.filter_groups.metric": ("score",),
    f"{ACTOR}.kl_loss_type": KL_TYPES,
    f"{ACTOR}.loss_agg_mode": LOSS_AGG_MODES,
    f"{CRITIC}.loss_agg_mode": LOSS_AGG_MODES,
    f"{ROLLOUT}.name": ("vllm",),
    f"{ACTOR}.megatron.dtype": ("float32", "bfloat16"),
    f"{ACTOR}.optim.lr_decay_style": ("constant", "linear", "cosine"),
    f"{CRITIC}.optim.lr_decay_style": ("constant", "linear", "cosine"),
}
"""Keys whose value (or, for a list, each element) is one of a few names."""

CHOICES_OR_NULL: dict[str, tuple[str, ...]] = {
    f"{CORRECTION}.rollout_is": ("token", "sequence"),
    f"{CORRECTION}.rollout_rs": ("token", "sequence", "geometric"),
}
"""Keys whose value is one of a few names, or null."""

AT_LEAST_ONE = (
    "trainer.total_training_steps",
    "data.train_batch_size",
    "data.gen_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "algorithm.kl_ctrl.horizon",
    "reward_model.num_workers",
    "reward_model.micro_batch_size_per_gpu",
    "reward_model.forward_max_token_len_per_gpu",
    f"{ROLLOUT}.val_kwargs.n",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    *(f"{ROLLOUT}.{name}" for name in ("n", "tensor_model_parallel_size", "max_num_seqs", "max_num_batched_tokens")),
    *(f"{ROLLOUT}.{name}" for name in ("kv_cache_memory_bytes", "log_prob_micro_batch_size_per_gpu")),
    f"{ROLLOUT}.update_weights_bucket_megabytes",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu",
    f"{CRITIC}.forward_max_token_len_per_gpu",
    f"{CRITIC}.forward_micro_batch_size_per_gpu",
    *(
        f"{role}.{name}"
        for role in (ACTOR, CRITIC)
        for name in (
            "megatron.tensor_model_parallel_size",
            "megatron.pipeline_model_parallel_size",
            "megatron.expert_model_parallel_size",
            "megatron.make_vocab_size_divisible_by",
            "ppo_mini_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
            "ppo_epochs",
        )
    ),
)
"""Counts and sizes."""

STAGE_SHARES = tuple(
    f"{role}.megatron.{name}"
    for role in (ACTOR, CRITIC)
    for name in (
        "virtual_pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
    )
)
"""How layers are shared out among stages; null: evenly."""

AT_LEAST_ONE_OR_NULL = (
    "trainer.max_ckpt_to_keep",
    *STAGE_SHARES,
    f"{ACTOR}.loss_scale_factor",
    f"{CRITIC}.loss_scale_factor",
)
"""Counts and sizes that may be left open."""


BUILT_IN_REWARDS = ("compute_score", "exact_match", "math")
"""What `custom_reward_function.name` may be where its `path` is null."""

REWARD_ARGUMENTS = {"data_source", "solution_str", "ground_truth", "extra_info"}
"""What every call of a reward function is given."""


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`; `nearest_low` is what to suggest below, where `low` itself does not belong."""

    low: float
    high: float = math.inf
    nearest_low: float | None = None

    def holds(self, value: float) -> bool:
        """Whether `value` is inside; NaN never is."""
        above = value >= self.low if self.nearest_low is None else value > self.low
        return above and value <= self.high and math.isfinite(value)

    def nearest(self, value: float) -> float:
        """A valid value near `value`."""
        return self.high if value > self.high else self.low if self.nearest_low is None else self.nearest_low

    def __str__(self) -> str:
        lower = f"{'>=' if self.nearest_low is None else '>'} {shown(self.low)}"
        return lower if math.isinf(self.high) else f"{lower} and <= {shown(self.high)}"


NOT_NEGATIVE, UNIT = Interval(0), Interval(0, 1)
RANGES_OR_NULL: dict[str, Interval] = {
    **dict.fromkeys(AT_LEAST_ONE_OR_NULL, Interval(1)),
    "trainer.stall_timeout_s": Interval(0, nearest_low=1800.0),
    f"{CORRECTION}.rollout_rs_threshold": Interval(1, nearest_low=2.0),
    f"{CORRECTION}.rollout_rs_threshold_lower": UNIT,
    f"{CORRECTION}.rollout_token_veto_threshold": Interval(0, 1, nearest_low=1e-4),
}
"""Keys whose value is a number in an interval, or null."""

MOST_RANKS = 100_000
"""Machines, and ranks of one: more are a slip of the finger, and rules look for every divisor of the ranks."""

LARGEST_SEED = 2**32 - 1
"""numpy's, with which vLLM seeds every rank; torch's are larger."""

RANGES: dict[str, Interval] = {
    "trainer.nnodes": Interval(1, MOST_RANKS),
    "trainer.n_gpus_per_node": Interval(1, MOST_RANKS),
    **dict.fromkeys(AT_LEAST_ONE, Interval(1)),
    "trainer.seed": Interval(0, LARGEST_SEED),
    "reward_model.timeout_s": Interval(0, nearest_low=10.0),
    "trainer.test_freq": NOT_NEGATIVE,
    "trainer.max_skipped_updates": NOT_NEGATIVE,
    "trainer.stop_grace_s": NOT_NEGATIVE,
    "trainer.heartbeat_timeout_s": Interval(10),
    f"{ROLLOUT}.verify_weights_every": NOT_NEGATIVE,
    "algorithm.gamma": UNIT,
    "algorithm.lam": UNIT,
    "algorithm.kl_ctrl.kl_coef": NOT_NEGATIVE,
    "algorithm.filter_groups.max_num_gen_batches": NOT_NEGATIVE,
    "algorithm.kl_ctrl.target_kl": Interval(0, nearest_low=0.1),
    f"{ROLLOUT}.temperature": Interval(0, nearest_low=1.0),
    f"{ROLLOUT}.top_p": Interval(0, 1, nearest_low=1.0),
    f"{ROLLOUT}.logprob_diff_bound": Interval(0, nearest_low=1e-3),
    f"{ROLLOUT}.val_kwargs.temperature": Interval(0, nearest_low=1.0),
    f"{ROLLOUT}.val_kwargs.top_p": Interval(0, 1, nearest_low=1.0),
    f"{ACTOR}.clip_ratio": Interval(0, nearest_low=0.2),
    f"{ACTOR}.clip_ratio_low": Interval(0, nearest_low=0.2),
    f"{ACTOR}.clip_ratio_high": Interval(0, nearest_low=0.2),
    f"{ACTOR}.clip_ratio_c": Interval(1, nearest_low=3.0),
    f"{ACTOR}.kl_loss_coef": NOT_NEGATIVE,
    f"{CORRECTION}.rollout_is_threshold": Interval(0, nearest_low=2.0),
    "reward_model.overlong_buffer.len": NOT_NEGATIVE,
    "reward_model.overlong_buffer.penalty_factor": NOT_NEGATIVE,
    f"{CRITIC}.cliprange_value": Interval(0, nearest_low=0.5),
    **{
        f"{role}.optim.{name}": interval
        for role in (ACTOR, CRITIC)
        for name, interval in (
            ("lr", NOT_NEGATIVE),
            ("min_lr", NOT_NEGATIVE),
            ("lr_warmup_steps", NOT_NEGATIVE),
            ("lr_decay_steps", NOT_NEGATIVE),
            ("eps", Interval(0, nearest_low=1e-8)),
            ("weight_decay", NOT_NEGATIVE),
            ("clip_grad", NOT_NEGATIVE),
        )
    },
}
"""Keys whose value is a number in an interval; none of them may be infinite or NaN."""

FINITE: dict[str, float] = {
    f"{ACTOR}.entropy_coeff": 0.0,
    "reward_model.rule_weight": 1.0,
    "reward_model.weight": 1.0,
    "reward_model.failed_score": 0.0,
}
"""The other numbers with a fraction, which may have either sign, and what to suggest for infinities and NaN."""


def value_problems(config: RunConfig) -> Iterable[Violation]:
    """Every value that breaks its own rule."""
    yield from _choice_problems(config)
    for key, interval in (RANGES | RANGES_OR_NULL).items():
        value = attrgetter(key)(config)
        if value is None and key in RANGES_OR_NULL:
            continue
        if not interval.holds(value):
            nearest: float | None = interval.nearest(value)
            if key in STAGE_SHARES:
                nearest = None  # an equal share, where one layer more or less may not come out even
            elif key in ("data.train_batch_size", "data.gen_batch_size"):
                nearest = max(1, config.actor_rollout_ref.actor.ppo_mini_batch_size)
            yield Violation({key: value}, f"must be {interval}", {key: nearest})
    for key, finite in FINITE.items():
        if not math.isfinite(attrgetter(key)(config)):
            yield Violation({key: attrgetter(key)(config)}, "must be a finite number", {key: finite})
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    for key, top_k in ((f"{ROLLOUT}.top_k", rollout.top_k), (f"{ROLLOUT}.val_kwargs.top_k", rollout.val_kwargs.top_k)):
        if top_k != -1 and top_k < 1:
            yield Violation({key: top_k}, "must be -1 (all tokens) or >= 1", {key: -1})
    if trainer.save_freq != -1 and trainer.save_freq < 1:
        yield Violation(
            {"trainer.save_freq": trainer.save_freq}, "must be -1 (never) or >= 1", {"trainer.save_freq": -1}
        )
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        path = trainer.resume_from_path
        nearest = {"trainer.resume_mode": "auto" if path is None else "resume_path"}
        if path is not None and not Path(path).expanduser().is_dir():
            nearest = {"trainer.resume_from_path": None}
        yield Violation(
            {"trainer.resume_from_path": trainer.resume_from_path, "trainer.resume_mode": trainer.resume_mode},
            "do not go together: the path is for resume_path, which needs it",
            nearest,
        )
    etp_size = config.actor_rollout_ref.actor.megatron.expert_tensor_parallel_size
    if etp_size is not None and etp_size < 1:
        key = f"{ACTOR}.megatron.expert_tensor_parallel_size"
        yield Violation({key: etp_size}, "must be null (as TP) or >= 1", {key: None})
    if not rollout.enforce_eager:
        yield Violation(
            {f"{ROLLOUT}.enforce_eager": False},
            "must be true: captured graphs need lasting addresses, and the memory of foreign stages and of the KV "
            "cache is given back between generations",
            {f"{ROLLOUT}.enforce_eager": True},
        )
    yield from _optimizer_problems(config)
    yield from reward_problems(config)
    yield from data_problems(config)


def _choice_problems(config: RunConfig) -> Iterable[Violation]:
    for key, choices in (CHOICES | CHOICES_OR_NULL).items():
        given = attrgetter(key)(config)
        names = given if isinstance(given, list) else [given]
        wrong = [name for name in names if name not in choices and not (name is None and key in CHOICES_OR_NULL)]
        if not wrong:
            continue
        nearest: Any = [nearest_name(name, choices) if name in wrong else name for name in names]
        rule = f"must be one of {', '.join(choices)}"
        if isinstance(given, list):
            yield Violation({key: given}, f"{rule}, each", {key: list(dict.fromkeys(nearest))})
        else:
            yield Violation({key: given}, rule, {key: nearest[0]})


def _optimizer_problems(config: RunConfig) -> Iterable[Violation]:
    for role, optim in ((ACTOR, config.actor_rollout_ref.actor.optim), (CRITIC, config.critic.optim)):
        if optim.lr >= 0 and optim.min_lr > optim.lr:
            key = f"{role}.optim.min_lr"
            yield Violation({key: optim.min_lr}, f"must be <= lr={shown(optim.lr)}", {key: optim.lr})
        if not all(0 <= beta < 1 for beta in optim.betas):
            key = f"{role}.optim.betas"
            yield Violation({key: list(optim.betas)}, "must both be >= 0 and < 1", {key: [0.9, 0.999]})


def reward_problems(config: RunConfig) -> Iterable[Violation]:
    """What is wrong with the choice of rewards."""
    custom = config.custom_reward_function
    yield from _reward_model_problems(config)
    if custom.path is None and custom.name is not None and custom.name not in BUILT_IN_REWARDS:
        key = "custom_reward_function.name"
        rule = f"must, without a path, be one of {', '.join(BUILT_IN_REWARDS)}"
        yield Violation({key: custom.name}, rule, {key: nearest_name(custom.name, BUILT_IN_REWARDS)})
    for name in sorted(REWARD_ARGUMENTS & custom.reward_kwargs.keys()):
        key = f"custom_reward_function.reward_kwargs.{name}"
        yield Violation({key: custom.reward_kwargs[name]}, "is given by each row", hint="leave it out, or rename it")


def _reward_model_problems(config: RunConfig) -> Iterable[Violation]:
    """What is wrong with the reward model and with its part of the score."""
    reward, has_rule = config.reward_model, uses_rule(config)
    if reward.enable and reward.model.path is None:
        key = "reward_model.model.path"
        yield Violation({key: None}, "must be a model folder, as reward_model.enable=true")
    if reward.enable and reward.model.input_tokenizer is not None:
        key = "reward_model.model.input_tokenizer"
        rule = "must be null: the reward model reads the actor's tokens, and no other chat template"
        yield Violation({key: reward.model.input_tokenizer}, rule, {key: None})
    key, name = "custom_reward_function.name", "compute_score"
    if not reward.enable and not has_rule:
        rule = "must be a function, as reward_model.enable=false: nothing would be rewarded"
        yield Violation({key: None}, rule, {key: name})
    elif not has_rule and config.custom_reward_function.path is not None:
        path = "custom_reward_function.path"
        yield Violation({path: config.custom_reward_function.path}, f"must be null, as {key}=null", {path: None})
    weights = {"reward_model.rule_weight": reward.rule_weight, "reward_model.weight": reward.weight}
    if (has_rule or reward.enable) and not (has_rule and reward.rule_weight) and not (reward.enable and reward.weight):
        key = "reward_model.weight" if reward.enable else "reward_model.rule_weight"
        yield Violation({key: weights[key]}, "must not be 0, as no other score counts", {key: 1.0})


def data_problems(config: RunConfig) -> Iterable[Violation]:
    """What is wrong with files and weights as such, and with the number of held-out answers."""
    data, val_kwargs = config.data, config.actor_rollout_ref.rollout.val_kwargs
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        if not is_path_or_paths(files):
            rule = "must be a path or a list of at least one path"
            yield Violation({key: files}, rule, hint="such as [prompts.parquet]")
    weights, key = data.train_file_weights, "data.train_file_weights"
    if weights is not None and is_path_or_paths(data.train_files):
        number = len(as_list(data.train_files))
        if len(weights) != number:
            rule = f"must be one number for each of data.train_files, of which there are {number}"
            yield Violation({key: weights}, rule, {key: [*map(_usable, weights), *[1.0] * number][:number]})
    if weights is not None and not all(math.isfinite(weight) and weight > 0 for weight in weights):
        yield Violation({key: weights}, "must be > 0 and finite", {key: [*map(_usable, weights)]})
    if val_kwargs.n > 1 and not val_kwargs.do_sample:
        yield Violation(
            {f"{ROLLOUT}.val_kwargs.n": val_kwargs.n, f"{ROLLOUT}.val_kwargs.do_sample": False},
            "ask for one greedy answer several times",
            {f"{ROLLOUT}.val_kwargs.do_sample": True},
        )


def _usable(weight: float) -> float:
    return weight if math.isfinite(weight) and weight > 0 else 1.0


def is_path_or_paths(files: object) -> bool:
    """Whether `files` is what `data.train_files` may be."""
    listed = [files] if isinstance(files, str) else files
    return isinstance(listed, list) and len(listed) > 0 and all(isinstance(path, str) for path in listed)
