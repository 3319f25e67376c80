"""Keys of rewards: the reward function, and reward models. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le

from megatron_rl.config.constraints import OURS, AtMost, Count, FilePath, NotNegative, OneOf, PassTokens, Positive, Size
from megatron_rl.config.judge_keys import SELF, JudgeConfig
from megatron_rl.config.megatron import MegatronConfig, follow_actor, follows
from megatron_rl.config.trainer import GLOBAL_POOL, MOST_RANKS

HELD_OUT, RUNNING = NORMALISATIONS = ("held_out", "running")
"""Choices of `normalize_reward` of a reward model, other than null."""
RESPONSE_END, TURN_ENDS = SCORED_AT = ("response", "turns")
"""Choices of `score_at` of a reward model."""


@dataclass
class CustomRewardFunctionConfig:
    path: FilePath | None = None
    """Python file with the reward function; null: a built-in one."""
    name: str | None = "compute_score"
    """The reward function in custom_reward_function.path: (data_source, solution_str, ground_truth, extra_info=None) ->
    float, or a dict with the float under "score" and further values to log. Built-in ones: exact_match | math |
    compute_score, which chooses by data source. null: no reward function, for runs with a reward model or an
    environment; prompts then need no ground truth."""
    per_group: Annotated[bool, OURS] = False
    """The reward function scores all responses to a prompt in one call, as compute_group_scores(rows) -> list of
    scores, for rewards that compare responses; it needs a path."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of every call of the reward function."""
    validation_only: Annotated[bool, OURS] = False
    """Call the reward function only for validation, to report accuracy. All rewards are those of the reward models, and
    training prompts need no ground truth."""


OVERLONG = "overlong_reward"
"""Name of the overlong penalty as a component of the score, verl's."""


@dataclass
class OverlongBufferConfig:
    enable: bool = False
    """Overlong penalty (DAPO): reduce the score of a response that uses the last `len` tokens that are allowed, by up
    to penalty_factor."""
    len: Count = 0
    """Tokens before data.max_response_length over which the overlong penalty grows."""
    penalty_factor: NotNegative = 1.0
    """Overlong penalty of a response of data.max_response_length tokens."""


@dataclass
class RewardModelModelConfig:
    path: FilePath | None = None
    """Hugging Face folder of the reward model: a ...ForSequenceClassification model with one label."""
    input_tokenizer: FilePath | None = None
    """null: the reward model reads the actor's tokens. Path of the actor's folder: it reads the conversation as text,
    rendered with the chat template and tokenizer of the reward model's folder."""
    use_remove_padding: bool = follows("actor_rollout_ref.model.use_remove_padding")
    """Pack the reward model's sequences end to end instead of padding each to the longest of its micro-batch."""


def scoring_key(name: str) -> str:
    """The group of keys of a reward model."""
    return name if name == "reward_model" else f"reward_models.{name}"


@dataclass
class ScoringModelConfig:
    """The keys of every reward model: of `reward_model`, and of each group in `reward_models`."""

    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    pool: Annotated[str, OURS] = GLOBAL_POOL
    """The pool whose ranks have the reward model."""
    weight: Annotated[float, OURS] = 1.0
    """Weight of the reward model's score, which is the output of its head at the last token of the response."""
    data_sources: Annotated[list[str] | None, OURS] = None
    """Score only responses to prompts of these data sources (column data.reward_fn_key); null: all."""
    normalize_reward: Annotated[str | None, OneOf(NORMALISATIONS), OURS] = None
    """Normalisation of the reward model's score in training, (score - mean) / standard deviation. held_out: those of
    the held-out scores that the model's folder records | running: those of all training scores so far | null: none."""
    reward_clip_range: Annotated[list[float] | None, OURS] = None
    """[lowest, highest]: training clips the normalised score of the reward model to this range; null: no clipping."""
    score_at: Annotated[str, OneOf(SCORED_AT), OURS] = RESPONSE_END
    """Where the reward model scores. response: at the last token | turns: at the end of each turn, as a process reward
    model; the score is the sum, and algorithm.turn_rewards=true places each part at its turn's end."""
    step_end: Annotated[str | None, OURS] = None
    """With score_at=turns: text of a token that ends a step within a turn, such as a line break; each step is scored as
    a turn is. null: turns alone."""
    max_length: Size | None = None
    """With model.input_tokenizer: largest number of tokens of a conversation that the reward model reads; the end of a
    longer one is cut off. null: data.max_prompt_length + data.max_response_length."""
    micro_batch_size_per_gpu: Size = follows("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu")
    """Samples per forward pass of the reward model, where use_dynamic_bsz is false."""
    use_dynamic_bsz: bool = follows("critic.use_dynamic_bsz")
    """Fill the reward model's micro-batches by tokens instead of by samples."""
    forward_max_token_len_per_gpu: PassTokens = follows("critic.forward_max_token_len_per_gpu")
    """Tokens per forward pass of the reward model, where use_dynamic_bsz is true."""
    megatron: MegatronConfig = field(default_factory=follow_actor)
    judge: Annotated[JudgeConfig, OURS] = field(default_factory=JudgeConfig)

    @property
    def is_judge(self) -> bool:
        """Whether the model writes its verdict, and is no classifier."""
        return self.judge.prompt is not None

    def scores_source(self, source: str) -> bool:
        """Return whether it scores responses to prompts of a data source."""
        return self.data_sources is None or source in self.data_sources

    @property
    def asks_policy(self) -> bool:
        """Whether the policy judges, so that there is no other model."""
        return self.is_judge and self.model.path == SELF


@dataclass
class RewardModelConfig(ScoringModelConfig):
    enable: bool = False
    """Score every response with a reward model: score = rule_weight * reward function + weight * reward model."""
    enable_resource_pool: bool = False
    """Give the reward model a pool of its own, reward_pool, with nnodes x n_gpus_per_node ranks."""
    nnodes: Annotated[int, Ge(0), Le(MOST_RANKS)] = 0
    """Nodes of reward_pool, with enable_resource_pool=true."""
    n_gpus_per_node: int = follows("trainer.n_gpus_per_node")
    """Ranks per node of reward_pool, with enable_resource_pool=true."""
    rule_weight: Annotated[float, OURS] = 1.0
    """Weight of the reward function's score, also without a reward model; not used with
    custom_reward_function.validation_only."""
    num_workers: Annotated[int, Ge(1), AtMost(4096)] = 4
    """Worker processes that call the reward function, in addition to the ranks."""
    timeout_s: Annotated[Positive, OURS] = 10.0
    """Seconds that a call of the reward function may take; then its worker process is killed and replaced."""
    launch_reward_fn_async: bool = False
    """Score finished responses while others are still generated: generation runs in slices of
    async_training.slice_steps. Asynchronous and multi-turn runs always do this."""
    failed_score: Annotated[float, OURS] = 0.0
    """Score of a sample for which the reward function raises, takes too long, ends its process, or returns no finite
    number."""
    stop_if_all_failed: Annotated[bool, OURS] = True
    """End the run (exit code 4) when the reward function fails for every sample of a step or of a validation."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
