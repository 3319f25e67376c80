"""The rules that a single value must keep, as tables: names to choose from, and intervals of numbers."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from megatron_rl.config.algorithms import KL_TYPES, LOSS_AGG_MODES
from megatron_rl.config.async_training import KV_CACHE_CHOICES, STRAGGLER_POLICIES
from megatron_rl.config.correction import IS_LEVELS, LOSS_TYPES
from megatron_rl.config.declarations import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from megatron_rl.config.tasks import BAD_ROWS, LOSS_ON, REFERENCES, STAGES
from megatron_rl.errors import shown

ACTOR, ROLLOUT, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "critic"
REWARD_MODEL = "reward_model"
CORRECTION = "algorithm.rollout_correction"

CHOICES: dict[str, Collection[str]] = {
    "reward_training.loss": REWARD_MODEL_LOSSES,
    "dpo.loss": PREFERENCE_LOSSES,
    "data.truncation": ("error", "left", "right", "middle", "drop"),
    "data.loss_on": LOSS_ON,
    "data.bad_rows": BAD_ROWS,
    "ptx.truncation": ("error", "left", "right", "drop"),
    "ptx.loss_on": LOSS_ON,
    "ptx.bad_rows": BAD_ROWS,
    "dpo.reference": REFERENCES,
    "trainer.stage": STAGES,
    "trainer.device": ("cpu", "cuda"),
    "async_training.kv_cache": KV_CACHE_CHOICES,
    "async_training.straggler_policy": STRAGGLER_POLICIES,
    "trainer.logger": ("console", "jsonl", "tensorboard", "wandb", "mlflow"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.kl_penalty": KL_TYPES,
    "algorithm.filter_groups.metric": ("score", "acc"),
    f"{ACTOR}.kl_loss_type": KL_TYPES,
    f"{ACTOR}.loss_agg_mode": LOSS_AGG_MODES,
    f"{CRITIC}.loss_agg_mode": LOSS_AGG_MODES,
    f"{CORRECTION}.loss_type": LOSS_TYPES,
    f"{ACTOR}.router_replay.mode": ("disabled", "R2", "R3"),
    f"{ROLLOUT}.name": ("vllm",),
    f"{ACTOR}.megatron.dtype": ("float32", "bfloat16", "float16"),
    **{f"{role}.optim.lr_decay_style": ("constant", "linear", "cosine", "WSD") for role in (ACTOR, CRITIC)},
    **{
        f"{role}.optim.lr_wsd_decay_style": ("exponential", "linear", "cosine", "minus_sqrt")
        for role in (ACTOR, CRITIC)
    },
}
"""Keys whose value (or, for a list, each element) is one of a few names."""

HELD_OUT, RUNNING = NORMALISATIONS = ("held_out", "running")
"""What `normalize_reward` of a reward model may be beside null."""

CHOICES_OR_NULL: dict[str, tuple[str, ...]] = {
    f"{REWARD_MODEL}.normalize_reward": NORMALISATIONS,
    f"{CORRECTION}.rollout_is": IS_LEVELS,
}
"""Keys whose value is one of a few names, or null."""

AT_LEAST_ONE = (
    "data.train_batch_size",
    "data.gen_batch_size",
    "ptx.mini_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "algorithm.kl_ctrl.horizon",
    "async_training.trigger_parameter_sync_step",
    "async_training.slice_steps",
    "async_training.straggler_slices",
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
            "megatron.context_parallel_size",
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
    "trainer.total_training_steps",
    "trainer.total_epochs",
    "actor_rollout_ref.model.override_config.max_position_embeddings",
    "reward_model.max_length",
    *STAGE_SHARES,
    f"{ACTOR}.loss_scale_factor",
    f"{CRITIC}.loss_scale_factor",
)
"""Counts and sizes that may be left open."""


REWARD_ARGUMENTS = {"data_source", "solution_str", "ground_truth", "extra_info"}
"""What every call of a reward function is given."""


def is_finite(value: float) -> bool:
    """As math.isfinite, of whole numbers of any length too."""
    return isinstance(value, int) or math.isfinite(value)


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`; `nearest_low` is what to suggest below, where `low` itself does not belong."""

    low: float
    high: float = math.inf
    nearest_low: float | None = None

    def holds(self, value: float) -> bool:
        """Whether `value` is inside; NaN never is."""
        above = value >= self.low if self.nearest_low is None else value > self.low
        return above and value <= self.high and is_finite(value)

    def rule(self, value: float) -> str:
        """What a value that is outside does not keep, as the rest of a sentence."""
        is_short = not is_finite(value) and not value > self.high
        return f"must be {'a finite number ' if is_short else ''}{self}"

    def nearest(self, value: float, usual: float | None = None) -> float:
        """A valid value near `value`: of NaN, and of an infinity to which nothing is near, the `usual` one."""
        if value > self.high:
            return self.high
        if usual is not None and not is_finite(value) and self.holds(usual):
            return usual
        return self.low if self.nearest_low is None else self.nearest_low

    def __str__(self) -> str:
        lower = f"{'>=' if self.nearest_low is None else '>'} {shown(self.low)}"
        return lower if math.isinf(self.high) else f"{lower} and <= {shown(self.high)}"


NOT_NEGATIVE, UNIT = Interval(0), Interval(0, 1)
OPTIONS = tuple(f"{role}.megatron.override_transformer_config" for role in (ACTOR, REF, CRITIC, "reward_model"))
"""Megatron's own options of every role's model."""
RANGES_OR_NULL: dict[str, Interval] = {
    "data.max_length": Interval(2),
    "ptx.max_length": Interval(2),
    **dict.fromkeys(AT_LEAST_ONE_OR_NULL, Interval(1)),
    "trainer.stall_timeout_s": Interval(0, nearest_low=1800.0),
    f"{ROLLOUT}.gpu_memory_utilization": Interval(0, 1, nearest_low=0.5),
    f"{CORRECTION}.rollout_rs_threshold_lower": UNIT,
    f"{ACTOR}.policy_loss.dro_beta": Interval(0, nearest_low=0.1),
    f"{CORRECTION}.rollout_token_veto_threshold": Interval(0, 1, nearest_low=1e-4),
    **{f"{group}.moe_z_loss_coeff": NOT_NEGATIVE for group in OPTIONS},
}
"""Keys whose value is a number in an interval, or null."""

MOST_RANKS = 100_000
"""Machines, ranks of one, and ranks of a pool: more are a slip of the finger, and plans go through them."""

RANKS = Interval(1, MOST_RANKS)
"""Sizes of a pool."""

LARGEST_SEED = 2**32 - 1
"""numpy's, with which vLLM seeds every rank; torch's are larger."""

RANGES: dict[str, Interval] = {
    "trainer.nnodes": RANKS,
    "trainer.n_gpus_per_node": RANKS,
    f"{ROLLOUT}.nnodes": Interval(0, MOST_RANKS),
    "reward_model.nnodes": Interval(0, MOST_RANKS),
    **dict.fromkeys(AT_LEAST_ONE, Interval(1)),
    "trainer.seed": Interval(0, LARGEST_SEED),
    "reward_model.timeout_s": Interval(0, nearest_low=10.0),
    "trainer.test_freq": NOT_NEGATIVE,
    f"{ACTOR}.router_replay.compare_freq": NOT_NEGATIVE,
    "trainer.critic_warmup": NOT_NEGATIVE,
    "trainer.rollout_ahead": NOT_NEGATIVE,
    "async_training.straggler_attempts": NOT_NEGATIVE,
    "async_training.max_replica_restarts": NOT_NEGATIVE,
    "trainer.log_val_generations": NOT_NEGATIVE,
    "trainer.max_skipped_updates": NOT_NEGATIVE,
    "trainer.stop_grace_s": NOT_NEGATIVE,
    "trainer.heartbeat_timeout_s": Interval(10),
    f"{ROLLOUT}.verify_weights_every": NOT_NEGATIVE,
    "algorithm.gamma": UNIT,
    "ptx.coef": NOT_NEGATIVE,
    "dpo.beta": Interval(0, nearest_low=0.1),
    "dpo.label_smoothing": Interval(0, 0.5),
    "dpo.simpo_gamma": NOT_NEGATIVE,
    "dpo.desirable_weight": NOT_NEGATIVE,
    "dpo.undesirable_weight": NOT_NEGATIVE,
    "algorithm.lam": UNIT,
    "algorithm.kl_ctrl.kl_coef": NOT_NEGATIVE,
    "algorithm.filter_groups.max_num_gen_batches": NOT_NEGATIVE,
    "algorithm.kl_ctrl.target_kl": Interval(0, nearest_low=0.1),
    f"{ROLLOUT}.temperature": Interval(0.01),  # colder, the engine draws at 0.01 and the trainer does not score so
    f"{ROLLOUT}.top_p": Interval(0, 1, nearest_low=1.0),
    f"{ROLLOUT}.logprob_diff_bound": Interval(0, nearest_low=1e-3),
    f"{ROLLOUT}.logprob_diff_mean_bound": Interval(0, nearest_low=1e-4),
    f"{ROLLOUT}.val_kwargs.temperature": Interval(0, nearest_low=1.0),
    f"{ROLLOUT}.val_kwargs.top_p": Interval(0, 1, nearest_low=1.0),
    f"{ACTOR}.clip_ratio": Interval(0, nearest_low=0.2),
    f"{ACTOR}.clip_ratio_low": Interval(0, nearest_low=0.2),
    f"{ACTOR}.clip_ratio_high": Interval(0, nearest_low=0.2),
    f"{ACTOR}.clip_ratio_c": Interval(1, nearest_low=3.0),
    f"{ACTOR}.kl_loss_coef": NOT_NEGATIVE,
    f"{ACTOR}.tau_pos": Interval(0, nearest_low=1.0),
    f"{ACTOR}.tau_neg": Interval(0, nearest_low=1.05),
    f"{ACTOR}.policy_loss.clip_cov_ratio": Interval(0, 1, nearest_low=0.0002),
    f"{ACTOR}.policy_loss.kl_cov_ratio": Interval(0, 1, nearest_low=0.0002),
    f"{ACTOR}.policy_loss.ppo_kl_coef": NOT_NEGATIVE,
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
            ("lr_warmup_steps_ratio", UNIT),
            ("lr_decay_steps", NOT_NEGATIVE),
            ("lr_wsd_decay_steps", NOT_NEGATIVE),
            ("eps", Interval(0, nearest_low=1e-8)),
            ("weight_decay", NOT_NEGATIVE),
            ("clip_grad", NOT_NEGATIVE),
            ("override_optimizer_config.optimizer_offload_fraction", UNIT),
        )
    },
    **{f"{group}.moe_aux_loss_coeff": NOT_NEGATIVE for group in OPTIONS},
    **{f"{group}.moe_router_bias_update_rate": Interval(0, nearest_low=0.001) for group in OPTIONS},
}
"""Keys whose value is a number in an interval; none of them may be infinite or NaN."""

FINITE: dict[str, float] = {
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    "reward_model.rule_weight": 1.0,
    "reward_model.weight": 1.0,
    "reward_model.failed_score": 0.0,
}
"""The other numbers with a fraction, which may have either sign, and what to suggest for infinities and NaN."""

LAYOUT_RANGES = {
    key.rpartition(".")[2]: interval
    for key, interval in (RANGES | RANGES_OR_NULL).items()
    if key.rpartition(".")[0] == f"{ACTOR}.megatron"
}
"""Sizes of a layout."""
