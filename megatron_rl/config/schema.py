"""The configuration, as dataclasses with verl's group and key names.

One class per group; the text under a field is its documentation. Batch sizes count prompts unless the name
says `per_gpu`; `rollout.n` multiplies them. `per_gpu` means per data-parallel rank, as in verl.
Fields whose default is `follows(KEY)` have that key's value until they are set. The elements of a `dict` field are the
user's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le

from megatron_rl.config.algorithm_keys import AlgorithmConfig, UserFileConfig
from megatron_rl.config.batch_sizes import BatchSizes
from megatron_rl.config.constraints import (
    OURS,
    AtMost,
    Count,
    FilePath,
    IsPath,
    Nearest,
    NotNegative,
    NumPrompts,
    OneOf,
    Or,
    PassTokens,
    Positive,
    Size,
    UnitInterval,
)
from megatron_rl.config.declarations import KL_ESTIMATES
from megatron_rl.config.distillation_keys import DistillationConfig
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.megatron import MegatronConfig, OptimConfig, follow_actor, follow_actor_in_all, follows
from megatron_rl.config.reward_keys import CustomRewardFunctionConfig, RewardModelConfig, ScoringModelConfig
from megatron_rl.config.rollout_keys import MTP, AsyncTrainingConfig, MTPUse, RolloutConfig
from megatron_rl.config.tasks import DPOConfig, PretrainingConfig, RewardTrainingConfig, TaskDataConfig
from megatron_rl.config.trainer import GLOBAL_POOL, RANKS, TrainerConfig

MISSING = "???"

GROUND_TRUTH = "reward_model.ground_truth"
"""The field of verl's schema that has the expected answer."""

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""How the loss terms of tokens are averaged into one loss."""


def mini_batch(config: RunConfig) -> int:
    """Return the prompts of an optimizer step of PPO, at least 1: suggested in place of an empty batch."""
    return max(1, config.actor_rollout_ref.actor.ppo_mini_batch_size) if config.generates else 1


MostRows = Annotated[int, Or(-1, "all rows"), Ge(1), Le(10**12)]
BatchPrompts = Annotated[int, Ge(1), AtMost(10**6), Nearest(mini_batch)]


@dataclass
class PoolConfig:
    nnodes: Annotated[int, RANKS, OURS] = 1
    """Nodes (machines) of this pool."""
    n_gpus_per_node: Annotated[int, RANKS, OURS] = 1
    """Ranks per node of this pool: GPUs, or processes when trainer.device=cpu."""


@dataclass
class PromptSamplerConfig:
    """A class of the user's that chooses the training prompts."""

    path: Annotated[FilePath | None, OURS] = None
    """Python file with a class that chooses the training prompts (a curriculum). The class is created with (rows,
    batch_size, seed, **kwargs) and has next_indices() -> positions, update(positions, scores), state_dict() and
    load_state_dict(state)."""
    name: Annotated[str, OURS] = "PromptSampler"
    """Name of the class in data.sampler.path."""
    kwargs: Annotated[dict[str, Any], OURS] = field(default_factory=dict)
    """Further keyword arguments of the class in data.sampler.path."""


@dataclass
class ImageSizesConfig:
    """How large images are when they are read, in place of the model folder's own limits."""

    min_pixels: Size | None = None
    """Smaller images are enlarged to at least this number of pixels; null: as the model folder's image processor."""
    max_pixels: Size | None = None
    """Larger images are reduced to at most this number of pixels, which bounds the tokens of an image; null: as the
    model folder's image processor."""


@dataclass
class DataConfig(TaskDataConfig):
    train_files: Annotated[Any, IsPath()] = MISSING
    """Parquet or jsonl file with the training prompts, in verl's row schema or with columns that keys below name; or a
    list of such files."""
    train_file_weights: Annotated[list[float] | None, OURS] = None
    """Shares of every batch that come from each of train_files, to any total; null: all prompts are one set."""
    val_files: Annotated[Any, IsPath()] = MISSING
    """File, or list of files, with the held-out prompts."""
    train_max_samples: MostRows = -1
    """Rows of train_files to use, in all; -1: all. With data.shuffle they are chosen at random by data.seed, as in
    verl; without, the first ones are used."""
    val_max_samples: MostRows = -1
    """Rows of val_files to use, chosen as with train_max_samples; -1: all."""
    prompt_key: str = "prompt"
    """Column with the chat messages (a list of {role, content}) or a plain string."""
    image_key: str | None = None
    """Column with the images of a prompt (png, jpeg or webp), for models that read images: bytes, a path, or an object
    with one of them, or a list of these. `<image>` in the text stands for the next one, or a part of type image. null:
    prompts are text. In multi-turn runs files may be without it, and turns may show images all the same."""
    image_folder: Annotated[FilePath | None, OURS] = None
    """Folder below which the paths of images must be, with links resolved; null: images are bytes in their rows."""
    mm_processor_kwargs: ImageSizesConfig = field(default_factory=ImageSizesConfig)
    ground_truth_key: Annotated[str | None, OURS] = GROUND_TRUTH
    """Column with the expected answer, such as answer; a field of a struct is named with a dot. null: rows have none,
    and the reward function gets None."""
    reward_fn_key: str = "data_source"
    """Column with the data source of a row, which the reward function gets and which validation metrics are grouped
    by."""
    default_data_source: Annotated[str | None, OURS] = None
    """Data source of rows that have none in column reward_fn_key, such as openai/gsm8k; null: every row must have its
    own where a reward function scores it, and the file's name is taken where none does."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the tokenizer's chat template, such as enable_thinking."""
    train_batch_size: BatchPrompts = 64
    """Prompts per training step."""
    gen_batch_size: BatchPrompts = follows("data.train_batch_size")
    """Prompts per batch of generation; may differ from train_batch_size only with algorithm.filter_groups."""
    max_prompt_length: Size = 512
    """Longest prompt, in tokens."""
    max_response_length: Size = 512
    """Longest response, in tokens."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length; if false, truncation decides."""
    truncation: Annotated[str, OneOf(("error", "left", "right", "middle", "drop"))] = "error"
    """Prompts longer than max_prompt_length: error | left, right: cut that side off | middle: keep both ends. In tasks
    that do not generate rows longer than max_length: error | left | right | drop: leave them out."""
    shuffle: bool = True
    """Reshuffle the training prompts every epoch, by data.seed."""
    seed: Annotated[int, AtMost(2**63 - 1)] = follows("trainer.seed")
    """Seed of the order of the training prompts (data.shuffle)."""
    sampler: PromptSamplerConfig = field(default_factory=PromptSamplerConfig)


@dataclass
class ModelOverrideConfig:
    max_position_embeddings: Size | None = None
    """Longest sequence (prompt + response) in place of config.json's: for models that are trained beyond it."""


@dataclass
class ModelConfig:
    path: FilePath = MISSING
    """Hugging Face folder: config.json, safetensors, tokenizer; or the Hub's id of a model in the local cache."""
    override_config: ModelOverrideConfig = field(default_factory=ModelOverrideConfig)
    use_remove_padding: bool = True
    """Pack the sequences of a micro-batch end to end instead of padding each to the longest."""
    enable_tree_training: Annotated[bool, OURS] = False
    """Prefix-tree training: pack sequences as a tree and compute a shared prefix once (the prompt of a group, the
    branches of an episode, equal starts of responses). All roles but reward models; CPUs only. Results differ in the
    last bits."""
    lora: LoraConfig = field(default_factory=LoraConfig)


def as_list(files: str | list[str]) -> list[str]:
    """Return the paths of a key that holds one path or a list of paths."""
    return [files] if isinstance(files, str) else list(files)


@dataclass
class CheckpointConfig:
    async_save: bool = False
    """Write checkpoints in a background thread; a checkpoint is valid once it is complete, at the start of a later
    step."""


@dataclass
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    """vanilla: PPO's clipped surrogate | gpg | clip_cov | kl_cov | gspo | gspo_token: as gspo | luspo | vespo |
    geo_mean | cispo | sapo | dppo_kl | dppo_tv | dro | bypass_mode: the loss of
    algorithm.rollout_correction.loss_type | the name of a function in custom.path."""
    custom: Annotated[UserFileConfig, OURS] = field(default_factory=UserFileConfig)
    clip_cov_ratio: Annotated[float, Gt(0), Le(1)] = 0.0002
    """clip_cov: share of a micro-batch's tokens that get no gradient; at least one, where there is a candidate."""
    clip_cov_lb: float = 1.0
    """clip_cov: only tokens whose covariance is above this bound (and below clip_cov_ub) are candidates."""
    clip_cov_ub: float = 5.0
    """clip_cov: only tokens whose covariance is below this bound (and above clip_cov_lb) are candidates."""
    kl_cov_ratio: Annotated[float, Gt(0), Le(1)] = 0.0002
    """kl_cov: share of a micro-batch's tokens, those with the largest covariance, that are penalised; at least one."""
    ppo_kl_coef: NotNegative = 0.1
    """kl_cov: weight of the penalty |log-ratio| on the tokens that kl_cov_ratio selects."""
    dro_beta: Annotated[float | None, Gt(0), Nearest(0.1), OURS] = None
    """dro: weight of the squared log-ratio; it has no default."""
    vespo_k_pos: Annotated[NotNegative, OURS] = 2.0
    """vespo: shape k of the weight w^k exp(lambda (1 - w)) of a sequence, where A >= 0; w is its importance ratio."""
    vespo_lambda_pos: Annotated[NotNegative, OURS] = 3.0
    """vespo: rate lambda of the weight w^k exp(lambda (1 - w)) of a sequence, for advantages >= 0."""
    vespo_k_neg: Annotated[NotNegative, OURS] = 3.0
    """vespo: shape k of the weight w^k exp(lambda (1 - w)) of a sequence, for advantages < 0."""
    vespo_lambda_neg: Annotated[NotNegative, OURS] = 2.0
    """vespo: rate lambda of the weight w^k exp(lambda (1 - w)) of a sequence, for advantages < 0."""
    off_policy_mask_threshold: Annotated[NotNegative | None, OURS] = None
    """With any loss: leave out responses with a negative advantage whose mean of log(p_old / p) over their tokens is
    above this (DeepSeek-V3.2); null: leave out none."""
    top_entropy_quantile: Annotated[UnitInterval, OURS] = 1.0
    """Share of a step's response tokens, those of the highest entropy, that the loss trains (80/20 rule: 0.2)."""


@dataclass
class RouterReplayConfig:
    mode: Annotated[str, OneOf(("disabled", "R2", "R3"))] = "disabled"
    """Router replay in MoE models. disabled: routers choose again in every pass | R2: updates use the experts that the
    pass for old log-probs chose | R3: that pass and updates use the experts that the rollout engine chose."""
    compare_freq: Annotated[Count, OURS] = 0
    """R3: every N steps run one more pass without replay, and report how far its log-probs are from the rollout's;
    0: never."""


@dataclass
class ActorConfig:
    pool: Annotated[str, OURS] = GLOBAL_POOL
    """The pool whose ranks train the actor."""
    ppo_mini_batch_size: NumPrompts = 32
    """Prompts per optimizer step (times rollout.n samples)."""
    ppo_micro_batch_size_per_gpu: Size = 64
    """Samples per forward/backward pass, where use_dynamic_bsz is false."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens instead of by samples: as few passes as ppo_max_token_len_per_gpu allows, with equal
    work."""
    ppo_max_token_len_per_gpu: PassTokens = 16384
    """Tokens per forward/backward pass, where use_dynamic_bsz is true."""
    ppo_epochs: Annotated[int, Ge(1), AtMost(1000)] = 1
    """Passes over each step's samples."""
    shuffle: bool = False
    """Split the samples into mini-batches in a new seeded order every epoch; false: in the order of the samples."""
    clip_ratio: Positive = 0.2
    """PPO's epsilon: the probability ratio is clipped to 1 - epsilon and 1 + epsilon."""
    clip_ratio_low: Positive = follows("actor_rollout_ref.actor.clip_ratio")
    """Lower clip: the probability ratio is clipped at 1 - clip_ratio_low."""
    clip_ratio_high: Positive = follows("actor_rollout_ref.actor.clip_ratio")
    """Upper clip: the probability ratio is clipped at 1 + clip_ratio_high; above clip_ratio_low it is DAPO's
    clip-higher."""
    clip_ratio_c: Annotated[float, Gt(1)] = 3.0
    """vanilla: dual clip, the largest ratio where the advantage is negative. dppo_kl and dppo_tv: the largest ratio of
    any token. Other losses do not use it."""
    tau_pos: Positive = 1.0
    """sapo: temperature of the gate for positive advantages."""
    tau_neg: Positive = 1.05
    """sapo: temperature of the gate for advantages <= 0. The larger it is, the sooner a token stops counting."""
    loss_agg_mode: Annotated[str, OneOf(LOSS_AGG_MODES)] = "token-mean"
    """How the loss terms of tokens become the loss of a mini-batch: token-mean | token-sum | seq-mean-token-sum |
    seq-mean-token-mean | seq-mean-token-sum-norm. geo_mean and sapo are always means over responses of means over
    tokens; there it applies to KL and entropy only."""
    loss_scale_factor: Size | None = None
    """Divisor of the sum over a response in loss_agg_mode=seq-mean-token-sum-norm; null: data.max_response_length."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL to the reference policy to the loss."""
    kl_loss_coef: NotNegative = 0.001
    """Weight of the KL term in the loss, with use_kl_loss."""
    kl_loss_type: Annotated[str, OneOf(KL_ESTIMATES)] = "low_var_kl"
    """Estimator of the KL term in the loss: kl (k1) | abs | mse (k2) | low_var_kl (k3); a + after it, such as k3+,
    takes the gradient of k2."""
    kl_loss_unbiased: Annotated[bool, OURS] = False
    """Multiply each token's KL estimate by p / p_old, gradient included (DeepSeek-V3.2)."""
    mtp_loss_scaling_factor: Annotated[NotNegative, OURS] = 0.0
    """Weight of the loss that trains the multi-token prediction (MTP) layer on the sampled tokens, for
    rollout.speculative=mtp; 0: the layer is not trained. The policy gets no gradient from it."""
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class RefConfig:
    """The reference of a KL, and of `dpo.reference=on_the_fly`."""

    pool: Annotated[str, OURS] = "${actor_rollout_ref.actor.pool}"
    """The pool whose ranks have the frozen reference model."""
    log_prob_micro_batch_size_per_gpu: Size = follows("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu")
    """Samples per forward pass of the reference, where log_prob_use_dynamic_bsz is false."""
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz")
    """Fill the reference's micro-batches by tokens instead of by samples."""
    log_prob_max_token_len_per_gpu: PassTokens = follows("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu")
    """Tokens per forward pass of the reference, where log_prob_use_dynamic_bsz is true."""
    sync_ref_model: Annotated[bool, OURS] = False
    """Move the reference (TR-DPO): every ref_model_sync_steps steps it becomes a * policy + (1 - a) * reference, with a
    = ref_model_mixup_alpha."""
    ref_model_mixup_alpha: Annotated[float, Gt(0), Le(1), OURS] = 0.6
    """sync_ref_model: share of the policy in the new reference; 1: the reference becomes the policy."""
    ref_model_sync_steps: Annotated[Size, OURS] = 512
    """sync_ref_model: training steps from one refresh of the reference to the next."""
    megatron: MegatronConfig = field(default_factory=follow_actor_in_all)

    def is_refreshed_after(self, step: int) -> bool:
        """Whether the reference moves to the policy once this step is taken."""
        return self.sync_ref_model and step % self.ref_model_sync_steps == 0


@dataclass
class ActorRolloutRefConfig:
    hybrid_engine: bool | None = None
    """true: actor and rollout share one pool (colocated) | false: the rollout has a pool of its own, rollout_pool, with
    rollout.nnodes x rollout.n_gpus_per_node ranks | null: the pools of actor.pool and rollout.pool."""
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)

    @property
    def mtp_use(self) -> MTPUse:
        """How the actor's multi-token prediction (MTP) layer is used."""
        if self.rollout.speculative != MTP:
            return MTPUse.NONE
        return MTPUse.TRAINED if self.actor.mtp_loss_scaling_factor else MTPUse.FROZEN


@dataclass
class CriticModelConfig:
    path: FilePath = "${actor_rollout_ref.model.path}"
    """Hugging Face folder of the critic's trunk; the value head is initialised randomly."""
    use_remove_padding: bool = follows("actor_rollout_ref.model.use_remove_padding")
    """Pack the critic's sequences end to end instead of padding each to the longest of its micro-batch."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class CriticConfig:
    enable: bool | None = None
    """Build and train a critic; null: only if algorithm.adv_estimator needs one."""
    pool: Annotated[str, OURS] = GLOBAL_POOL
    """The pool whose ranks train the critic."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    ppo_mini_batch_size: NumPrompts = follows("actor_rollout_ref.actor.ppo_mini_batch_size")
    """Prompts per optimizer step of the critic (times rollout.n samples)."""
    ppo_micro_batch_size_per_gpu: Size = follows("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    """Samples per forward/backward pass of the critic, where critic.use_dynamic_bsz is false."""
    forward_micro_batch_size_per_gpu: Size = follows("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu")
    """Samples per forward pass that computes values, where critic.use_dynamic_bsz is false."""
    use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill the critic's micro-batches by tokens, up to the two token limits below, instead of by samples."""
    ppo_max_token_len_per_gpu: PassTokens = follows("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    """Tokens per forward/backward pass of the critic, where critic.use_dynamic_bsz is true."""
    forward_max_token_len_per_gpu: PassTokens = follows("critic.ppo_max_token_len_per_gpu")
    """Tokens per forward pass that computes values, where critic.use_dynamic_bsz is true."""
    ppo_epochs: Annotated[int, Ge(1), AtMost(1000)] = follows("actor_rollout_ref.actor.ppo_epochs")
    """Passes of the critic over each step's samples."""
    shuffle: bool = follows("actor_rollout_ref.actor.shuffle")
    """Split the samples into mini-batches of the critic in a new seeded order every epoch."""
    cliprange_value: Positive = 0.5
    """Value clipping: how far a value may move from its old one before its loss is clipped."""
    loss_agg_mode: Annotated[str, OneOf(LOSS_AGG_MODES)] = "${actor_rollout_ref.actor.loss_agg_mode}"
    """How the value losses of tokens become the loss of a mini-batch, as actor.loss_agg_mode."""
    loss_scale_factor: Annotated[Size | None, OURS] = follows("actor_rollout_ref.actor.loss_scale_factor")
    """Divisor of the sum over a response in critic.loss_agg_mode=seq-mean-token-sum-norm; null:
    data.max_response_length."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    megatron: MegatronConfig = field(default_factory=follow_actor)
    checkpoint: CheckpointConfig = field(
        default_factory=lambda: CheckpointConfig(follows("actor_rollout_ref.actor.checkpoint.async_save"))
    )


@dataclass
class RunConfig:
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    reward_models: Annotated[dict[str, ScoringModelConfig], OURS] = field(default_factory=dict)
    """Further reward models, by names that you choose; each adds weight * score to the score of a response."""
    pools: Annotated[dict[str, PoolConfig], OURS] = field(default_factory=dict)
    """Pools of ranks in addition to global_pool, by names that you choose; the `pool` key of a role names its pool."""
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    custom_scorers: Annotated[dict[str, UserFileConfig], OURS] = field(default_factory=dict)
    """Your own scorers: custom_scorers.CLASS.path is the Python file that defines the scorer class CLASS."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    ptx: Annotated[PretrainingConfig, OURS] = field(default_factory=PretrainingConfig)
    reward_training: Annotated[RewardTrainingConfig, OURS] = field(default_factory=RewardTrainingConfig)
    dpo: Annotated[DPOConfig, OURS] = field(default_factory=DPOConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def generates(self) -> bool:
        """Whether the command samples responses."""
        return True

    @property
    def batch_sizes(self) -> BatchSizes:
        """Prompts and samples of a training step and of its optimizer steps."""
        return BatchSizes(self.data.train_batch_size, self.data.gen_batch_size, self.actor_rollout_ref.rollout.n)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response."""
        return self.data.max_response_length

    @property
    def temperature(self) -> float:
        """Temperature of the policy's distribution, whose log-probs the trainer computes."""
        return self.actor_rollout_ref.rollout.temperature

    @property
    def may_be_stale(self) -> bool:
        """Whether a step may train tokens of earlier weights: of this run's, or of the run that recorded them."""
        return self.trainer.rollout_ahead > 0 or self.async_training.partial_rollout

    @property
    def samples_ahead(self) -> bool:
        """Whether generation continues from step to step: asynchronously, or with responses that outlast a step.

        False with recorded samples: only validation generates.
        """
        return self.may_be_stale and self.trainer.rollouts_from is None

    @property
    def judges(self) -> dict[str, ScoringModelConfig]:
        """Reward models that write their verdict, by name."""
        return {name: model for name, model in self.scoring_models.items() if model.is_judge}

    @property
    def scoring_models(self) -> dict[str, ScoringModelConfig]:
        """Every reward model by name: classifiers and judges, also a judge that is no role, as the policy is."""
        first: dict[str, ScoringModelConfig] = {"reward_model": self.reward_model} if self.reward_model.enable else {}
        return first | self.reward_models

    @property
    def has_turns(self) -> bool:
        """Whether an environment answers the policy's turns."""
        return self.generates and self.actor_rollout_ref.rollout.multi_turn.enable

    @property
    def returns_experts(self) -> bool:
        """Whether the rollout engine returns the experts of every token."""
        shared = self.actor_rollout_ref
        return shared.rollout.enable_rollout_routing_replay or shared.actor.router_replay.mode == "R3"

    def ignores(self, key: str) -> bool:
        """Return whether the command does not read a dotted key."""
        return False


Config = TypeVar("Config", bound=RunConfig)
"""The configuration of any command."""
