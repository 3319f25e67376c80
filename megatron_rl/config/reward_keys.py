"""Keys of what rewards answers: the user's function, and reward models. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le

from megatron_rl.config.constraints import OURS, AtMost, Count, FilePath, NotNegative, OneOf, PassTokens, Positive, Size
from megatron_rl.config.megatron import MegatronConfig, follow_actor, follows
from megatron_rl.config.trainer import GLOBAL_POOL, MOST_RANKS

HELD_OUT, RUNNING = NORMALISATIONS = ("held_out", "running")
"""Choices of `normalize_reward` of a reward model, besides null."""


@dataclass
class CustomRewardFunctionConfig:
    path: FilePath | None = None
    """Python file of the rule reward; null: a built-in one."""
    name: str | None = "compute_score"
    """Function in that file: (data_source, solution_str, ground_truth, extra_info=None) -> float, or a dict with the
    float under "score" and further numbers to log. Built-in ones: exact_match | math | compute_score, which chooses by
    data source. null, with a reward model or an environment: no rule; then prompts need no ground truth."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of every call."""
    validation_only: Annotated[bool, OURS] = False
    """Ask the rule about held-out answers alone, for their accuracy: rewards, there too, are the reward models', and
    training prompts need no ground truth."""


@dataclass
class OverlongBufferConfig:
    enable: bool = False
    """Take up to penalty_factor off the score of an answer whose last `len` allowed tokens are used."""
    len: Count = 0
    """Length of that stretch, in tokens."""
    penalty_factor: NotNegative = 1.0
    """Penalty of an answer of data.max_response_length tokens."""


@dataclass
class RewardModelModelConfig:
    path: FilePath | None = None
    """Hugging Face folder of a ...ForSequenceClassification model with one label."""
    input_tokenizer: FilePath | None = None
    """null: the reward model reads the actor's tokens. The actor's folder: it reads the conversation as text, which is
    rendered with the chat template of its own folder and tokenised with the tokenizer there."""
    use_remove_padding: bool = follows("actor_rollout_ref.model.use_remove_padding")
    """Pack the reward model's sequences end to end instead of padding each to the longest of its micro-batch."""


@dataclass
class ScoringModelConfig:
    """The keys of every reward model: of `reward_model`, and of each group in `reward_models`."""

    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    pool: Annotated[str, OURS] = GLOBAL_POOL
    """The pool whose ranks hold the reward model."""
    weight: Annotated[float, OURS] = 1.0
    """Weight of the reward model's score: its head's output at the last token of prompt and answer."""
    data_sources: Annotated[list[str] | None, OURS] = None
    """Score only answers to prompts with one of these names in column data.reward_fn_key; null: all."""
    normalize_reward: Annotated[str | None, OneOf(NORMALISATIONS), OURS] = None
    """How training takes that score. null: as it is | held_out: less the mean of the model's own held-out scores, over
    their spread, both from its folder | running: the same with those of all training scores until now."""
    reward_clip_range: Annotated[list[float] | None, OURS] = None
    """[lowest, highest] that training takes of the score, once it is normalised; null: any."""
    max_length: Size | None = None
    """With model.input_tokenizer: tokens that the reward model reads of a conversation at most; the end of a longer one
    is cut off. null: data.max_prompt_length + data.max_response_length."""
    micro_batch_size_per_gpu: Size = follows("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu")
    """Samples per forward pass of the reward model, where not dynamic."""
    use_dynamic_bsz: bool = follows("critic.use_dynamic_bsz")
    """Fill the reward model's micro-batches by tokens instead of by samples."""
    forward_max_token_len_per_gpu: PassTokens = follows("critic.forward_max_token_len_per_gpu")
    """Tokens per forward pass of the reward model, where use_dynamic_bsz is true."""
    megatron: MegatronConfig = field(default_factory=follow_actor)


@dataclass
class RewardModelConfig(ScoringModelConfig):
    enable: bool = False
    """Score every answer with a reward model, too: score = rule_weight * rule + weight * model."""
    enable_resource_pool: bool = False
    """Give the reward model a pool of its own, reward_pool, of nnodes x n_gpus_per_node ranks."""
    nnodes: Annotated[int, Ge(0), Le(MOST_RANKS)] = 0
    """Machines of that pool."""
    n_gpus_per_node: int = follows("trainer.n_gpus_per_node")
    """Ranks per machine of that pool."""
    rule_weight: Annotated[float, OURS] = 1.0
    """Weight of the rule's score, also without a reward model; not used with custom_reward_function.validation_only."""
    num_workers: Annotated[int, Ge(1), AtMost(4096)] = 4
    """Processes that call the reward function, in addition to the ranks."""
    timeout_s: Annotated[Positive, OURS] = 10.0
    """Seconds that the reward function may take for one sample; then its process is killed and replaced."""
    launch_reward_fn_async: bool = False
    """Generate in slices of async_training.slice_steps, so that answers which have ended are scored while others are
    generated; ahead of training, and with turns, that is always so."""
    failed_score: Annotated[float, OURS] = 0.0
    """Score of a sample whose rule raises, takes too long, ends its process, or returns no finite number."""
    stop_if_all_failed: Annotated[bool, OURS] = True
    """End the run (exit code 4) when that happens to every sample of a step or of a validation."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
