"""Rows of generation: its weights, draft tokens, shared prefixes, graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_rl.config.keys import ACTOR, ROLLOUT
from megatron_rl.config.rollout_keys import EARLIER, FP8, MTP
from megatron_rl.model.families.family import Style
from megatron_rl.model.parts import GroupedAttention
from megatron_rl.planning.features import CPU, Feature, Relation, Requirement, RunFacts, Settings, Use, equals, where

QUANTIZATION, DROP = f"{ROLLOUT}.quantization", f"{ROLLOUT}.drop_train_weights"
DELTAS, EAGER, UNIT = f"{ROLLOUT}.weight_deltas", f"{ROLLOUT}.enforce_eager", f"{ROLLOUT}.prefix_match_unit"
SPECULATIVE, FACTOR = f"{ROLLOUT}.speculative", f"{ACTOR}.mtp_loss_scaling_factor"
SCHEDULING = f"{ROLLOUT}.async_scheduling"
DP, EP = f"{ROLLOUT}.data_parallel_size", f"{ROLLOUT}.expert_parallel_size"
SLOTS = f"{ROLLOUT}.max_loras"
BITWISE, TP, TOP_P, TOP_K = (f"{ROLLOUT}.{key}" for key in ("bitwise", "tensor_model_parallel_size", "top_p", "top_k"))
ACTOR_TP, DTYPE = f"{ACTOR}.megatron.tensor_model_parallel_size", f"{ACTOR}.megatron.dtype"
SLICES = "slices count engine steps, and one step would still run when a slice has ended"
COUNTED = "engine steps are counted, and the steps that draft tokens save depend on rounding"


def _undrafted(run: RunFacts, use: Use) -> str:
    model = run.model_of(run.policy)
    name = "" if model is None or model.model is None else model.attention.undrafted
    return f"vLLM cannot take back what {name} has read of a wrong draft" if name else ""


def _no_mtp(run: RunFacts, use: Use) -> str:
    model = run.model_of(run.policy)
    return "" if model is None or model.no_mtp is None else f"no multi-token prediction layer: {model.no_mtp}"


def _whole_prompts(run: RunFacts, use: Use) -> str:
    model = run.model_of(run.policy)
    if model is None or model.model is None or not run.on_cpu or run.device not in model.attention.block_sizes:
        return ""
    if any(layer.attention.state_bytes(1, 4) for layer in model.parts.kinds):
        return "a layer with states keeps them at the ends of blocks alone"
    return model.attention.unreplayable.get(run.device, "")


def _not_bitwise(run: RunFacts, use: Use) -> str:
    model = run.model_of(run.policy)
    if model is None or model.model is None:
        return ""
    family, attention = model.parts.family, model.attention
    experts = family.experts
    if experts is not None and (experts.shared, experts.scoring) != (None, None):
        return "shared experts and scores by a sigmoid have no such arithmetic"
    if model.num_experts and run.value(TP) > 1:
        return "the parts of experts that TP cuts are added in another order in vLLM"
    is_plain = isinstance(attention, GroupedAttention) and attention == GroupedAttention(
        attention.hidden,
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_size,
        qkv_bias=attention.qkv_bias,
        qk_norm=attention.qk_norm,
        kv_heads_key=attention.kv_heads_key,
    )
    return "" if is_plain and family.style == Style() else "only plain attention and gated MLPs have such arithmetic"


def _other_numbers(run: RunFacts, use: Use) -> str:
    is_wide = run.device == CPU and run.policy.megatron.dtype == "float32"
    return "" if is_wide else "its arithmetic is that of float32 on CPUs"


def _tp_sizes(run: RunFacts, use: Use) -> Settings:
    rollout, actor = run.config.actor_rollout_ref.rollout, run.policy.megatron
    return {TP: rollout.tensor_model_parallel_size, ACTOR_TP: actor.tensor_model_parallel_size}


def _other_sums(run: RunFacts, use: Use) -> str:
    return "" if len({*_tp_sizes(run, use).values()}) == 1 else "another number of TP ranks adds up other sums"


def _attention_dp(run: RunFacts) -> Iterator[Use]:
    rollout = run.config.actor_rollout_ref.rollout
    if rollout.attention_dp_size > 1:
        alone = {DP: 1, EP: rollout.tensor_model_parallel_size}
        yield Use({DP: rollout.data_parallel_size, EP: rollout.expert_parallel_size}, alone)


def _cut_tokens(run: RunFacts, use: Use) -> str:
    is_whole = (run.value(TOP_P), run.value(TOP_K)) == (1.0, -1)
    return "" if is_whole else "the trainer's distribution has all tokens"


ROWS = (
    Feature(
        "cuda_graphs",
        "CUDA graphs",
        {EAGER: False},
        where(EAGER, True, lambda eager: not eager),
        excludes=(Relation("cpu", "there are no graphs to capture on a CPU"),),
        proven=(),
        in_tasks=True,
    ),
    Feature(
        "dropped_weights",
        "training shards dropped during generation",
        {DROP: True},
        where(DROP),
        excludes=(
            Relation("own_pool", "actor and rollout are on different ranks: nothing to drop", {DROP: False}),
            Relation(
                "merged_adapters",
                "the base cannot be made again of merged weights",
                {"actor_rollout_ref.model.lora.merge": False},
            ),
            Relation("trained_tower", "shards come back from those of generation, which has no tower", {DROP: False}),
        ),
    ),
    Feature(
        "weight_deltas",
        "transfers of changed weights alone",
        {DELTAS: True},
        where(DELTAS),
        needs=(
            Relation(
                "own_pool",
                "weights that stay on their ranks are not sent",
                hint="or give the rollout ranks of its own with actor_rollout_ref.hybrid_engine=false",
                gives_up=True,
            ),
        ),
    ),
    Feature(
        "fp8_rollouts",
        "FP8 rollouts",
        {QUANTIZATION: FP8},
        where(QUANTIZATION, None, equals(FP8)),
        needs=(
            Relation(
                "importance_weights",
                "tokens are sampled with rounded weights, and without importance weights nothing corrects for that",
            ),
        ),
        excludes=(Relation("dropped_weights", "training weights cannot be made again of FP8 weights", {DROP: False}),),
        refused_unproven=True,
    ),
    Feature(
        "speculative_decoding",
        "speculative decoding",
        {SPECULATIVE: EARLIER},
        where(SPECULATIVE, None),
        of_model=(Requirement("attention without a state", _undrafted),),
        refused_unproven=True,
    ),
    Feature(
        "mtp_drafts",
        "draft tokens of an MTP layer",
        {SPECULATIVE: MTP},
        where(SPECULATIVE, EARLIER, equals(MTP)),
        excludes=(
            Relation("partial_rollout", COUNTED),
            Relation("over_sampling", COUNTED),
        ),
        of_model=(Requirement("a multi-token prediction layer", _no_mtp),),
    ),
    Feature(
        "mtp_training",
        "training of an MTP layer",
        {FACTOR: 0.1},
        where(FACTOR, 0.0, lambda factor: 0 < factor < math.inf),
        needs=(Relation("mtp_drafts", "nothing else reads the layer", gives_up=True),),
        excludes=(
            Relation("prefix_tree", "in a prefix tree a token may have several next tokens"),
            Relation("lora", "the layer is one of the base, which stays, and an adapter's folder has no place for it"),
        ),
    ),
    Feature(
        "shared_prompts",
        "prompts that share a prefix inside a block",
        {UNIT: 4},
        where(UNIT, None, lambda unit: unit is not None and unit >= 1),
        of_model=(Requirement("attention whose prefixes vLLM keeps, without a state", _whole_prompts),),
        refused_unproven=True,
    ),
    Feature(
        "async_scheduling",
        "asynchronous scheduling",
        {SCHEDULING: True},
        where(SCHEDULING),
        excludes=(
            Relation("multi_turn", SLICES, {SCHEDULING: False}),
            Relation("early_rewards", SLICES, {SCHEDULING: False}),
            Relation("partial_rollout", SLICES, {SCHEDULING: False}),
            Relation("rollout_ahead", SLICES, {SCHEDULING: False}),
            Relation("speculative_decoding", "draft tokens follow tokens that must be known when a step begins"),
            Relation("shared_prompts", "samples wait for the step that has read their prompt", {SCHEDULING: False}),
        ),
    ),
    Feature(
        "attention_dp",
        "attention data parallelism of generation",
        {DP: 2, EP: 2},
        _attention_dp,
        excludes=(
            Relation(
                "async_scheduling", "TP groups that share experts agree on a step when none runs", {SCHEDULING: False}
            ),
        ),
    ),
    Feature(
        "adapter_slots",
        "several resident adapters in generation",
        {SLOTS: 2},
        where(SLOTS, 1, lambda slots: slots > 1),
        needs=(Relation("lora", "weights that are trained whole have no adapters", gives_up=True),),
        excludes=(
            Relation("merged_adapters", "weights with adapters merged in are those of one version"),
            Relation("own_pool", "`serve` samples in the actor's pool"),
        ),
        refused_unproven=True,
    ),
    Feature(
        "bitwise",
        "log-probs of trainer and rollout that are equal to the last bit",
        {BITWISE: True},
        where(BITWISE),
        excludes=(
            Relation("fp8_rollouts", "rounded weights are not those that are trained", {BITWISE: False}),
            Relation("merged_adapters", "a merged weight is another sum than base and adapter", {BITWISE: False}),
            Relation("fp8_training", "generation multiplies without rounding", {BITWISE: False}),
            Relation("transformer_engine", "its products are not those of tiles", {BITWISE: False}),
            Relation("context_parallel", "sums of other ranks' keys are added in another order", {BITWISE: False}),
            Relation("attention_dp", "experts of other ranks are added in another order", {BITWISE: False}),
            Relation("adapter_slots", "its products are those of one adapter"),
        ),
        of_model=(Requirement("plain attention, gated MLPs, experts with a softmax", _not_bitwise, {BITWISE: False}),),
        of_layout=(
            Requirement(
                "float32 on CPUs",
                _other_numbers,
                {BITWISE: False},
                keys=lambda run, use: {"trainer.device": run.device, DTYPE: run.policy.megatron.dtype},
            ),
            Requirement(
                "LoRA adapters with TP 1",
                lambda run, use: (
                    "vLLM adds the parts of adapters that TP cuts after their last product, the trainer before it"
                    if run.policy.lora.rank > 0 and run.value(TP) > 1
                    else ""
                ),
                {BITWISE: False},
                keys=lambda run, use: {"actor_rollout_ref.model.lora.rank": run.policy.lora.rank, TP: run.value(TP)},
            ),
            Requirement("rollout TP = training TP", _other_sums, {BITWISE: False}, keys=_tp_sizes),
            Requirement(
                "top_p=1 and top_k=-1",
                _cut_tokens,
                {TOP_P: 1.0, TOP_K: -1},
                keys=lambda run, use: {TOP_P: run.value(TOP_P), TOP_K: run.value(TOP_K)},
            ),
        ),
    ),
)
