"""The configuration of a role on Megatron's grid: its optimizer, its layout, what it keeps and what it recomputes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from annotated_types import Ge

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
"""Layers per pipeline stage. The suggestion is null, an equal share: another number of layers may not come out even."""


LOCAL, TE_LINEAR, TRANSFORMER_ENGINE = IMPLEMENTATIONS = ("local", "te_linear", "transformer_engine")
"""Who computes the linear layers."""

FP8_FORMATS = ("e4m3", "hybrid")
FP8_RECIPES = {"blockwise": 128, "tensorwise": 16}
"""Recipe -> what the tokens of a pass must be a multiple of, on every rank."""


@dataclass
class OverrideOptimizerConfig:
    """Megatron's own options of the optimizer."""

    optimizer_cpu_offload: bool = False
    """Keep moments and masters in host memory and compute Adam there: gradients go there and weights come back in every
    update. Less memory on the device, slower."""
    optimizer_offload_fraction: UnitInterval = 1.0
    """Share of the parameters to offload, with optimizer_cpu_offload."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copy the next parameter while another is computed, with optimizer_cpu_offload."""


@dataclass
class OptimConfig:
    lr: NotNegative = 1e-6
    """Peak learning rate."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    lr_warmup_steps: Count = 0
    """Training steps of linear warm-up, each with all of its optimizer steps."""
    lr_warmup_steps_ratio: UnitInterval = 0.0
    """Warm-up as a share of the whole run, if lr_warmup_steps is 0."""
    lr_decay_style: Annotated[str, OneOf(("constant", "linear", "cosine", "WSD"))] = "constant"
    """constant | linear | cosine | WSD: constant, and only the last lr_wsd_decay_steps of lr_decay_steps go down."""
    lr_decay_steps: Count = 0
    """Training steps until min_lr is reached; 0: those of the whole run. Not used when constant."""
    lr_wsd_decay_style: Annotated[str, OneOf(("exponential", "linear", "cosine", "minus_sqrt"))] = "exponential"
    """Shape of the decay with WSD: exponential | linear | cosine | minus_sqrt."""
    lr_wsd_decay_steps: Count = 0
    """Training steps of that decay; with WSD at least 1."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's moment decay rates."""
    eps: Annotated[Positive, OURS] = 1e-8
    """Adam's epsilon."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay of matrices; biases and norms have none."""
    clip_grad: NotNegative = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    override_optimizer_config: OverrideOptimizerConfig = field(default_factory=OverrideOptimizerConfig)


@dataclass
class OverrideTransformerConfig:
    """Megatron's own options of a model."""

    recompute_granularity: str | None = None
    """full: of some layers keep only what goes in and run their forward pass once more for the backward pass, which
    costs time for memory | selective: the same of the parts in recompute_modules, in all layers | null: keep all
    activations. Of no effect where nothing is trained."""
    recompute_method: str | None = None
    """Layers to recompute with full. uniform: all, in runs of recompute_num_layers | block: the first
    recompute_num_layers ones."""
    recompute_num_layers: int | None = None
    """uniform: layers of a run, of which only the input is kept | block: layers of each chunk of a stage."""
    recompute_modules: list[str] | None = None
    """Parts to recompute with selective: core_attn | mlp, of dense layers | moe, router and experts; null: core_attn.
    """
    transformer_impl: Annotated[str, OneOf(IMPLEMENTATIONS)] = LOCAL
    """Who computes the linear layers of attention and dense MLPs. local: Megatron's own | te_linear: transformer-engine
    | transformer_engine: with the norm before each. The last two need trainer.device=cuda, where te_linear is the
    default of a role with fp8. Weights have the same names in checkpoints."""
    fp8: Annotated[str | None, OneOf(FP8_FORMATS)] = None
    """Products of those layers in 8 bits, with weights and gradients as before. e4m3 | hybrid: e5m2 for gradients |
    null: none. Needs transformer_impl other than local; on CPUs megatron.fp8_emulate. The reference follows the actor.
    """
    fp8_recipe: Annotated[str, OneOf(tuple(FP8_RECIPES))] = "blockwise"
    """Elements with one scale. blockwise: 128 of a token, 128 x 128 of a weight | tensorwise: a whole tensor."""
    gradient_accumulation_fusion: bool = False
    """Add the gradients of attention's and dense MLPs' weights to the float32 buffer as they are computed, instead of
    making them in the model's dtype first. With apex, if it is installed."""
    cp_comm_type: str = "p2p"
    """How attention reaches the keys of other context-parallel ranks. p2p: they go round in a ring | all_gather: all at
    once | a2a: ranks change tokens for heads and back, where their number divides the query heads of a TP rank."""
    moe_router_load_balancing_type: str = "none"
    """Balancing of the load of the actor's experts: none | seq_aux_loss, a loss of every layer's router over the
    tokens of each row, whose gradient does not depend on how a mini-batch is cut."""
    moe_aux_loss_coeff: NotNegative = 0.0
    """Weight of the loss of seq_aux_loss."""
    moe_z_loss_coeff: NotNegative | None = None
    """Weight of the mean square of log(sum(exp(router logits))); null: no such loss."""
    moe_router_enable_expert_bias: bool = False
    """After every update of the actor move the biases by which its experts are chosen against their load; of models
    that have such biases."""
    moe_router_bias_update_rate: Positive = 0.001
    """Size of each move."""


@dataclass
class OverrideDDPConfig:
    """Megatron's own options of data-parallel traffic."""

    overlap_grad_reduce: bool = False
    """Reduce gradients in buckets, each while the backward pass computes the next, instead of all at its end."""
    bucket_size: Annotated[int | None, Or(None, "Megatron's choice"), Ge(1), AtMost(2**50)] = None
    """Parameters of a bucket, on the first pipeline stage; others have one. null: 40 million, or a million for each
    data-parallel rank where that is more. Needs overlap_grad_reduce."""
    overlap_param_gather: bool = False
    """Bring updated parameters to the other data-parallel ranks in the forward pass of the next mini-batch, bucket by
    bucket, instead of before it. Needs overlap_grad_reduce."""


@dataclass
class LayoutConfig:
    """Keys that all roles of one pool share, because they share one grid of processes."""

    tensor_model_parallel_size: Size = 1
    """TP: ranks that share every layer."""
    pipeline_model_parallel_size: Size = 1
    """PP: consecutive stages of layers."""
    virtual_pipeline_model_parallel_size: StageShare = None
    """VPP: model chunks per stage, for a smaller pipeline bubble; null: one."""
    num_layers_in_first_pipeline_stage: Annotated[StageShare, OURS] = None
    """Layers of the first stage; null: an equal share."""
    num_layers_in_last_pipeline_stage: Annotated[StageShare, OURS] = None
    """Layers of the last stage; null: an equal share."""
    context_parallel_size: Size = 1
    """CP: ranks that share every sequence, each with an equal part of its tokens. Their number goes off that of
    data-parallel ranks. Limits of tokens per GPU count a rank's part."""
    dynamic_context_parallel: bool = False
    """Cut each sequence over as few ranks as its tokens need, 1, 2, 4 ... context_parallel_size of them, instead of all
    over as many; ranks that do not share one work on others. Needs passes by tokens (use_dynamic_bsz), packed
    (use_remove_padding)."""
    expert_model_parallel_size: Size = 1
    """EP: ranks of one stage among which experts are dealt out."""
    expert_tensor_parallel_size: Annotated[int | None, Or(None, "as TP"), Ge(1)] = None
    """ETP: ranks that share every expert; null: TP."""
    sequence_parallel: bool = False
    """Split activations between the TP regions over TP ranks; training experts with TP > 1 needs it. On
    trainer.device=cuda the default is true; of no effect where TP is 1."""
    make_vocab_size_divisible_by: Annotated[int, Ge(1), AtMost(2**20), OURS] = 64
    """Vocabulary rows are padded to a multiple of it, and of TP. Padded otherwise than vLLM does, to a multiple of 64,
    those matrices cannot be shared."""
    dtype: Annotated[str, OneOf(("float32", "bfloat16", "float16"))] = "float32"
    """Parameter and compute type: float32 | bfloat16 | float16, with which the loss is scaled while gradients are
    computed, as much as they can be without an overflow. On trainer.device=cuda the default is bfloat16."""


LAYOUT_KEYS = tuple(field.name for field in fields(LayoutConfig))


@dataclass
class MegatronConfig(LayoutConfig):
    param_offload: bool = False
    """Keep the parameters in host memory while generating; not the actor's in the pool that generates: it reads them.
    Like the next two of no effect in a pool that does not generate."""
    grad_offload: bool = False
    """Give the gradient buffers' memory back while generating."""
    optimizer_offload: bool = False
    """Keep the optimizer state in host memory while generating."""
    fp8_emulate: Annotated[bool, OURS] = False
    """On CPUs, which have no products in 8 bits: round what goes into the products as override_transformer_config.fp8
    says, and multiply in dtype. Slow; to see what 8 bits do to a run."""
    override_transformer_config: OverrideTransformerConfig = field(default_factory=OverrideTransformerConfig)
    override_ddp_config: OverrideDDPConfig = field(default_factory=OverrideDDPConfig)


def follows(key: str) -> Any:
    """A field's default: the value of another key, as an interpolation that the loader resolves."""
    return f"${{{key}}}"


ACTOR_LAYOUT = "actor_rollout_ref.actor.megatron"
FOLLOWED_OPTIONS = ("cp_comm_type", "transformer_impl")
"""Options of the actor's layers that other roles have, too, until they are set for them."""
FORWARD_OPTIONS = (*FOLLOWED_OPTIONS, "fp8", "fp8_recipe")
"""Options that change a forward pass."""


def follow_actor() -> MegatronConfig:
    """A layout that is the actor's until a key is set."""
    layout = MegatronConfig(**{name: follows(f"{ACTOR_LAYOUT}.{name}") for name in LAYOUT_KEYS})
    _follow_options(layout, FOLLOWED_OPTIONS)
    return layout


def follow_actor_in_all() -> MegatronConfig:
    """A layout and a forward pass that are the actor's until a key is set: what is compared with it rounds as it."""
    layout = follow_actor()
    layout.fp8_emulate = follows(f"{ACTOR_LAYOUT}.fp8_emulate")
    _follow_options(layout, FORWARD_OPTIONS)
    return layout


def _follow_options(layout: MegatronConfig, names: Iterable[str]) -> None:
    for name in names:
        setattr(layout.override_transformer_config, name, follows(f"{ACTOR_LAYOUT}.override_transformer_config.{name}"))
