"""The Megatron configuration of a role: optimizer, parallel layout, offloading and recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from annotated_types import Ge, Le

from megatron_rl.config.constraints import (
    OURS,
    AtMost,
    Count,
    Nearest,
    NotNegative,
    OneOf,
    Or,
    Positive,
    Size,
    UnitInterval,
)

StageShare = Annotated[int | None, Ge(1), Nearest(None)]
"""Layers per pipeline stage. The suggestion is null, an equal share, as another number of layers may not divide
evenly."""


LOCAL, TE_LINEAR, TRANSFORMER_ENGINE = IMPLEMENTATIONS = ("local", "te_linear", "transformer_engine")
"""Implementations of the linear layers."""

PLAIN_KERNELS, FUSED_KERNELS = ATTENTION_KERNELS = ("plain", "fused")
"""Kernels of attention that flash attention does not have."""

FP8_FORMATS = ("e4m3", "hybrid")
FP8_RECIPES = {"blockwise": 128, "tensorwise": 16}
"""FP8 recipe -> number of which the tokens of a pass must be a multiple, on every rank."""


ADAM, MUON = OPTIMIZERS = ("adam", "muon")
MUON_SCALES = ("spectral", "unit_rms_norm", "shape_scaling")
"""Factors of an orthogonalized update of n rows and m columns: `roles.orthogonal.scale_factor`."""
ALL_DIGITS = "highest"


@dataclass
class OverrideOptimizerConfig:
    """Megatron's own options of the optimizer."""

    optimizer_cpu_offload: bool = False
    """Keep Adam's moments and master weights in host memory and compute the update there: gradients are copied to the
    host and weights back in every update. Less device memory, slower."""
    optimizer_offload_fraction: UnitInterval = 1.0
    """Share of the parameters whose optimizer state is offloaded, with optimizer_cpu_offload."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Overlap the copies of one parameter with the update of another, with optimizer_cpu_offload."""
    muon_momentum: Annotated[float, Ge(0), Le(1)] = 0.95
    """Muon's decay rate of the momentum."""
    muon_use_nesterov: bool = True
    """Muon's Nesterov momentum."""
    muon_num_ns_steps: Annotated[int, Ge(1), AtMost(99)] = 5
    """Newton-Schulz steps of an update."""
    muon_scale_mode: Annotated[str, OneOf(MUON_SCALES)] = "spectral"
    """Factor of an update of n x m. spectral: sqrt(max(n, m)) | unit_rms_norm: sqrt(n / m) | shape_scaling:
    sqrt(max(1, n / m))."""
    muon_extra_scale_factor: Positive = 1.0
    """Further factor of every Muon update. 0.2 with spectral: learning rates as Adam's."""
    muon_tp_mode: Annotated[str, OneOf(("duplicated", "blockwise"))] = "duplicated"
    """Matrices that TP cuts. duplicated: orthogonalized whole, by every TP rank | blockwise: each rank's part alone,
    so results depend on TP."""
    muon_split_qkv: bool = True
    """Orthogonalize query, key and value apart; false: stacked."""
    muon_fp32_matmul_prec: Annotated[str, OneOf(("medium", ALL_DIGITS))] = "medium"
    """Newton-Schulz in bfloat16 (medium), as torch's Muon, or in float32 (highest)."""


@dataclass
class OptimConfig:
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = ADAM
    """adam | muon: Muon for the layers' matrices, Adam for everything else: embeddings, heads, norms, biases."""
    lr: NotNegative = 1e-6
    """Peak learning rate, after the warm-up."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the decay, and after it."""
    lr_warmup_steps: Count = 0
    """Training steps of linear warm-up."""
    lr_warmup_steps_ratio: UnitInterval = 0.0
    """Warm-up as a share of the whole run, if lr_warmup_steps is 0."""
    lr_decay_style: Annotated[str, OneOf(("constant", "linear", "cosine", "WSD"))] = "constant"
    """Learning rate schedule: constant | linear | cosine | WSD: constant until the last lr_wsd_decay_steps of
    lr_decay_steps."""
    lr_decay_steps: Count = 0
    """Training steps until min_lr is reached; 0: those of the whole run. Not used with lr_decay_style=constant."""
    lr_wsd_decay_style: Annotated[str, OneOf(("exponential", "linear", "cosine", "minus_sqrt"))] = "exponential"
    """lr_decay_style=WSD: shape of the decay, exponential | linear | cosine | minus_sqrt."""
    lr_wsd_decay_steps: Count = 0
    """lr_decay_style=WSD: training steps of the decay, at least 1."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates of the first and second moment."""
    eps: Annotated[Positive, OURS] = 1e-8
    """Adam's epsilon, added to the root of the second moment."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay of matrices; biases and norms have none."""
    clip_grad: NotNegative = 1.0
    """Largest global gradient norm, to which gradients are clipped; 0: no clipping."""
    override_optimizer_config: OverrideOptimizerConfig = field(default_factory=OverrideOptimizerConfig)


@dataclass
class OverrideTransformerConfig:
    """Megatron's own options of a model."""

    recompute_granularity: str | None = None
    """Activation recomputation (gradient checkpointing). full: of some layers keep only the input and run the forward
    pass again in the backward pass, which trades time for memory | selective: the same for the parts in
    recompute_modules, in all layers | null: keep all activations. No effect on roles that are not trained."""
    recompute_method: str | None = None
    """recompute_granularity=full: layers to recompute. uniform: all, in groups of recompute_num_layers | block: the
    first recompute_num_layers ones."""
    recompute_num_layers: int | None = None
    """recompute_method=uniform: layers of a group, of which only the input is kept | block: recomputed layers of each
    model chunk."""
    recompute_modules: list[str] | None = None
    """recompute_granularity=selective: parts to recompute, core_attn | mlp: of dense layers | moe: router and experts;
    null: core_attn."""
    transformer_impl: Annotated[str, OneOf(IMPLEMENTATIONS)] = LOCAL
    """Implementation of the linear layers of attention and dense MLPs. local: Megatron's | te_linear:
    transformer-engine's | transformer_engine: transformer-engine's, fused with the norm before it. The last two need
    trainer.device=cuda, where te_linear is the default of a role with fp8. Weights have the same names in
    checkpoints."""
    fp8: Annotated[str | None, OneOf(FP8_FORMATS)] = None
    """FP8 training: matrix products of the linear layers of attention and dense MLPs in FP8; weights, gradients and
    adapters keep their dtype. e4m3 | hybrid: e5m2 for gradients | null: no FP8. Needs a transformer_impl other than
    local; on CPUs megatron.fp8_emulate. The reference follows the actor."""
    fp8_recipe: Annotated[str, OneOf(tuple(FP8_RECIPES))] = "blockwise"
    """FP8 scaling. blockwise: one scale for 128 elements of a token and for 128 x 128 of a weight | tensorwise: one
    scale for a tensor."""
    gradient_accumulation_fusion: bool = False
    """Accumulate weight gradients of attention and dense MLPs directly in the float32 buffer, without a tensor in the
    model's dtype in between. Uses apex, if it is installed."""
    cp_comm_type: str = "p2p"
    """Communication of context parallelism. p2p: ring attention | all_gather: gather all keys and values | a2a:
    exchange tokens for heads and back (as DeepSpeed-Ulysses); CP must divide the query heads of a TP rank."""
    moe_router_load_balancing_type: str = "none"
    """Load balancing of a trained model's experts: none | seq_aux_loss: an auxiliary loss of every layer's router over
    the tokens of each sequence, whose gradient does not depend on micro-batches."""
    moe_aux_loss_coeff: NotNegative = 0.0
    """Weight of the auxiliary load balancing loss (moe_router_load_balancing_type=seq_aux_loss)."""
    moe_z_loss_coeff: NotNegative | None = None
    """Weight of the router z-loss, the mean square of log(sum(exp(router logits))); null: no z-loss."""
    moe_router_enable_expert_bias: bool = False
    """Bias-based load balancing: after every update change the router biases of overloaded and underloaded
    experts. Only for models that have such biases."""
    moe_router_bias_update_rate: NotNegative = 0.001
    """moe_router_enable_expert_bias: change of a router bias per update; 0: biases stay."""

    @property
    def bias_update_rate(self) -> float:
        """The change of a router bias per update; 0 where biases stay."""
        return self.moe_router_bias_update_rate if self.moe_router_enable_expert_bias else 0.0


@dataclass
class OverrideDDPConfig:
    """Megatron's own options of data-parallel traffic."""

    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass, bucket by bucket, instead of reducing all at its end."""
    bucket_size: Annotated[int | None, Or(None, "Megatron's choice"), Ge(1), AtMost(2**50)] = None
    """Parameters of a gradient bucket on the first pipeline stage; other stages have one bucket. null: the larger of 40
    million and one million per data-parallel rank. Needs overlap_grad_reduce."""
    overlap_param_gather: bool = False
    """Overlap the all-gather of updated parameters over data-parallel ranks with the forward pass of the next
    mini-batch. Needs overlap_grad_reduce."""


@dataclass
class LayoutConfig:
    """Keys that all roles of one pool share, because they share one process mesh."""

    tensor_model_parallel_size: Size = 1
    """TP: number of ranks over which every layer is split."""
    pipeline_model_parallel_size: Size = 1
    """PP: number of pipeline stages."""
    virtual_pipeline_model_parallel_size: StageShare = None
    """VPP (interleaved pipeline): model chunks per stage, for a smaller pipeline bubble; null: one."""
    num_layers_in_first_pipeline_stage: Annotated[StageShare, OURS] = None
    """Layers of the first pipeline stage; null: an equal share."""
    num_layers_in_last_pipeline_stage: Annotated[StageShare, OURS] = None
    """Layers of the last pipeline stage; null: an equal share."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer where layers are split over stages: the first chunk has one layer less."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as a layer where layers are split over stages: the last chunk has one layer less."""
    context_parallel_size: Size = 1
    """CP: number of ranks over which every sequence is split, each with an equal part of its tokens; DP shrinks by this
    factor. Token limits per GPU count the part of a rank."""
    dynamic_context_parallel: bool = False
    """Dynamic CP: split each sequence over as few ranks as its tokens need (1, 2, 4 ... context_parallel_size) instead
    of over all of them; the other ranks work on other sequences. Needs use_dynamic_bsz and use_remove_padding."""
    expert_model_parallel_size: Size = 1
    """EP: number of ranks of a pipeline stage over which experts are distributed."""
    expert_tensor_parallel_size: Annotated[int | None, Or(None, "as TP"), Ge(1)] = None
    """ETP: number of ranks over which every expert is split; null: as TP."""
    sequence_parallel: bool = False
    """Sequence parallelism: split activations outside of the TP regions over TP ranks. Training experts with TP > 1
    needs it. Default on trainer.device=cuda: true. No effect with TP 1."""
    make_vocab_size_divisible_by: Annotated[int, Ge(1), AtMost(2**20), OURS] = 64
    """The vocabulary is padded to a multiple of this and of TP. With another value than vLLM's 64 the embedding and
    output matrices cannot be shared with vLLM."""
    dtype: Annotated[str, OneOf(("float32", "bfloat16", "float16"))] = "float32"
    """Parameter and compute dtype: float32 | bfloat16 | float16: with dynamic loss scaling. Default on
    trainer.device=cuda: bfloat16."""


UNEVEN_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
"""Keys of the layers of these stages."""
COUNTED_PARTS = tuple(f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
"""Keys of the parts that count as a layer where layers are split over stages."""
LAYOUT_KEYS = tuple(field.name for field in fields(LayoutConfig))


@dataclass
class MegatronConfig(LayoutConfig):
    param_offload: bool = False
    """Keep the parameters in host memory during generation. Not for the actor in the pool that generates, where vLLM
    reads them. No effect in a pool that does not generate."""
    grad_offload: bool = False
    """Free the gradient buffers during generation. No effect in a pool that does not generate."""
    optimizer_offload: bool = False
    """Keep the optimizer state in host memory during generation. No effect in a pool that does not generate."""
    fp8_emulate: Annotated[bool, OURS] = False
    """Emulate FP8 on CPUs, which have no FP8 products: round the inputs as override_transformer_config.fp8 says and
    multiply in dtype. Experts are rounded, too; on GPUs they keep their dtype. Slow; to see what FP8 does to a run."""
    attention_kernels: Annotated[str, OneOf(ATTENTION_KERNELS), OURS] = PLAIN_KERNELS
    """Kernels of attention with sinks or soft caps and of the gated delta rule; no effect on other attention. plain:
    matrix products in float32, on any device | fused: torch's FlexAttention, and flash-linear-attention's gated delta
    rule, which must be installed (pip install flash-linear-attention). fused needs trainer.device=cuda."""
    freeze_vision_model: bool = True
    """Keep the vision tower of a model that reads images as it is. false: train it with the language model; the actor
    only, in runs that generate."""
    override_transformer_config: OverrideTransformerConfig = field(default_factory=OverrideTransformerConfig)
    override_ddp_config: OverrideDDPConfig = field(default_factory=OverrideDDPConfig)


def follows(key: str) -> Any:
    """Return a default that is the value of another key: an interpolation that the loader resolves."""
    return f"${{{key}}}"


ACTOR_LAYOUT = "actor_rollout_ref.actor.megatron"
FOLLOWED_OPTIONS = ("cp_comm_type", "transformer_impl")
"""Options of the actor's layers that other roles follow until they are set for them."""
FORWARD_OPTIONS = (*FOLLOWED_OPTIONS, "fp8", "fp8_recipe")
"""Options that change a forward pass."""


def follow_actor() -> MegatronConfig:
    """Return a layout that follows the actor's until a key is set."""
    layout = MegatronConfig(**{name: follows(f"{ACTOR_LAYOUT}.{name}") for name in LAYOUT_KEYS})
    layout.attention_kernels = follows(f"{ACTOR_LAYOUT}.attention_kernels")
    _follow_options(layout, FOLLOWED_OPTIONS)
    return layout


def follow_actor_in_all() -> MegatronConfig:
    """Return a layout and forward options that follow the actor's until a key is set, so that both round alike."""
    layout = follow_actor()
    layout.fp8_emulate = follows(f"{ACTOR_LAYOUT}.fp8_emulate")
    _follow_options(layout, FORWARD_OPTIONS)
    return layout


def _follow_options(layout: MegatronConfig, names: Iterable[str]) -> None:
    for name in names:
        setattr(layout.override_transformer_config, name, follows(f"{ACTOR_LAYOUT}.override_transformer_config.{name}"))
