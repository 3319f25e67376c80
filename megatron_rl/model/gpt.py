"""From a Hugging Face config to one rank's Megatron model: language model or value model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from transformers import PretrainedConfig

from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.device import Device
from megatron_rl.model.attention import CausalAttention, StackedQKVSelfAttention
from megatron_rl.model.context_attention import ContextAttention
from megatron_rl.model.described_layers import norm_of, put_attention, put_router, rotary_frequencies, scale_embedding
from megatron_rl.model.experts import SharedExpertsLayer, StackedExperts, has_experts, moe_settings
from megatron_rl.model.families import ModelShape, Routing, family_of
from megatron_rl.model.mlp import gate_sparingly
from megatron_rl.model.value_head import ValueHead
from megatron_rl.model.vocab_head import pass_hidden_states
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.parallel.sharding import padded_vocab_size
from megatron_rl.parallel.stages import StagePlan


def transformer_config(
    hf_config: PretrainedConfig, groups: TrainGroups, megatron: MegatronConfig, device: Device
) -> TransformerConfig:
    """Megatron's configuration of the model on this rank, one for all chunks of its stage.

    Raises ConfigError for an unknown architecture, ValueError if the layers cannot be split over the stages.
    """
    dtype = getattr(torch, megatron.dtype)
    family, settings = family_of(hf_config.architectures), hf_config.to_dict()
    stages = StagePlan.from_config(hf_config.num_hidden_layers, megatron)
    routing = Routing.from_hf(family, settings) if family.is_moe else None
    shape = ModelShape.from_hf(settings)
    override = megatron.override_transformer_config
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=shape.num_kv_heads,
        # Megatron computes the angles, so of latent attention it needs only the rotated part.
        kv_channels=shape.latent.rope if shape.latent else shape.head_size,
        ffn_hidden_size=hf_config.intermediate_size,
        tensor_model_parallel_size=groups.grid.tp_size,
        pipeline_model_parallel_size=groups.grid.pp_size,
        context_parallel_size=groups.grid.cp_size,
        cp_comm_type=override.cp_comm_type,
        virtual_pipeline_model_parallel_size=stages.vpp_size if stages.vpp_size > 1 else None,
        num_layers_in_first_pipeline_stage=stages.first,
        num_layers_in_last_pipeline_stage=stages.last,
        sequence_parallel=uses_sequence_parallel(megatron),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        layernorm_epsilon=hf_config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias or shape.qkv_bias,
        qk_layernorm=family.qk_norm or shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity=override.recompute_granularity,
        recompute_method=override.recompute_method,
        recompute_num_layers=override.recompute_num_layers,
        recompute_modules=None if override.recompute_modules is None else list(override.recompute_modules),
        # Weights always come from a checkpoint, so none are drawn; the caller moves the model to its device.
        perform_initialization=False,
        use_cpu_initialization=True,
        # The fused kernels need CUDA extensions; without them one code path serves every device.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        batch_p2p_comm=device.batched_p2p,
        **(moe_settings(routing, hf_config.num_hidden_layers, groups.grid) if routing else {}),
    )


def uses_sequence_parallel(megatron: MegatronConfig) -> bool:
    """Whether activations are split over TP ranks; a TP group of one has nothing to split."""
    return megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1


def layer_spec(config: TransformerConfig, vp_stage: int, hf_config: PretrainedConfig) -> TransformerBlockSubmodules:
    """The layers of one chunk of this rank's stage: Megatron's, with our attention, norms and experts."""
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    kinds = {with_experts: one_layer(config, with_experts, hf_config) for with_experts in (False, True)}
    specs = [kinds[has_experts(config, layer)] for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm_of(family_of(hf_config.architectures).style))


def one_layer(config: TransformerConfig, with_experts: bool, hf_config: PretrainedConfig) -> ModuleSpec:
    """The spec of a layer with or without experts."""
    num_experts = config.num_moe_experts if with_experts else None
    norm = norm_of(family_of(hf_config.architectures).style)
    layer = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = norm
    layer.submodules.pre_mlp_layernorm = norm
    layer.submodules.self_attention.module = StackedQKVSelfAttention
    attention = layer.submodules.self_attention.submodules
    core_attention = ContextAttention if config.context_parallel_size > 1 else CausalAttention
    attention.core_attention = ModuleSpec(module=core_attention)
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    put_attention(layer, hf_config)
    if num_experts:
        block = moe_submodules(layer.submodules.mlp)
        block.experts = StackedExperts
        block.shared_experts.module = SharedExpertsLayer
        put_router(block, hf_config)
    return layer


def moe_submodules(mlp: Any) -> Any:
    """The submodules of a layer with experts, which is a `partial` in newer versions of Megatron and a spec in
    older.
    """
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def build_language_model(
    hf_config: PretrainedConfig, config: TransformerConfig, groups: TrainGroups, vocab_multiple: int
) -> list[GPTModel]:
    """The chunks of this rank's stage of the language model, weights not yet loaded. All ranks must call.

    The last stage returns hidden states [B, S, H]; `VocabHead` applies the head to the scored tokens only.
    """
    chunks = build_stage(hf_config, config, groups, vocab_multiple, tied=hf_config.tie_word_embeddings)
    if groups.is_last_stage:
        pass_hidden_states(chunks[-1].output_layer, groups.tp_group)
    return chunks


def build_value_model(
    hf_config: PretrainedConfig, config: TransformerConfig, groups: TrainGroups, vocab_multiple: int, head_seed: int
) -> list[GPTModel]:
    """The chunks of a value model: the trunk, and a new head that maps a hidden state to one value. All ranks
    must call.
    """
    chunks = build_stage(hf_config, config, groups, vocab_multiple, tied=False)
    if groups.is_last_stage:
        chunks[-1].output_layer = ValueHead(config, head_seed, groups.tp_group)
    return chunks


def build_stage(
    hf_config: PretrainedConfig, config: TransformerConfig, groups: TrainGroups, vocab_multiple: int, tied: bool
) -> list[GPTModel]:
    """One pipeline stage of a decoder, in the order its chunks are run.

    tied: the vocabulary head shares the embedding's weight. Raises ConfigError for an unsupported rotary embedding.
    """
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    chunks = [
        GPTModel(
            config,
            layer_spec(config, vp_stage, hf_config),
            vocab_size=padded_vocab_size(hf_config.vocab_size, vocab_multiple),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=groups.is_first_stage and vp_stage == 0,
            post_process=groups.is_last_stage and vp_stage == num_chunks - 1,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        for vp_stage in range(num_chunks)
    ]
    frequencies, style = rotary_frequencies(hf_config, config.kv_channels), family_of(hf_config.architectures).style
    for chunk in chunks:
        chunk.rotary_pos_emb.inv_freq = frequencies
        # All positions have angles here; the segments of a context-parallel rank say which it needs.
        chunk.rotary_pos_emb.cp_group = None
        scale_embedding(chunk, style)
        for layer in chunk.decoder.layers:
            if isinstance(layer.mlp, MLP):
                eps, norm = config.layernorm_epsilon, norm_of(style)
                norm_after = norm(config, config.hidden_size, eps) if style.norms_after else None
                gate_sparingly(layer.mlp, style.activation, norm_after)
    return chunks
