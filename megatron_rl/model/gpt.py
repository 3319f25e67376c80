"""From a Hugging Face config to one rank's Megatron model: language model or value model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from transformers import PretrainedConfig

from megatron_rl.config.megatron import LOCAL, MegatronConfig
from megatron_rl.device import Device
from megatron_rl.model.decoder import Chunk, build_chunk, head_of, layers_of, replace_head, set_angles
from megatron_rl.model.experts import moe_settings
from megatron_rl.model.families import Model, family_of
from megatron_rl.model.layer_specs import norm_of, put_part, rotary_frequencies, scale_embedding, scale_layers
from megatron_rl.model.mlp import gate_sparingly
from megatron_rl.model.parts import Layer
from megatron_rl.model.te_layers import put_te_layers
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
    settings = hf_config.to_dict()
    model = Model.of(settings)
    stages = StagePlan.from_config(hf_config.num_hidden_layers, megatron)
    override = megatron.override_transformer_config
    is_local = override.transformer_impl == LOCAL
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=hf_config.num_attention_heads,
        ffn_hidden_size=model.shape.dense_ffn_size or model.shape.ffn_size,
        tensor_model_parallel_size=groups.grid.tp_size,
        pipeline_model_parallel_size=groups.grid.pp_size,
        context_parallel_size=groups.grid.cp_size,
        cp_comm_type=override.cp_comm_type,
        virtual_pipeline_model_parallel_size=stages.vpp_size if stages.vpp_size > 1 else None,
        num_layers_in_first_pipeline_stage=stages.first,
        num_layers_in_last_pipeline_stage=stages.last,
        account_for_embedding_in_pipeline_split=stages.counts_embedding,
        account_for_loss_in_pipeline_split=stages.counts_loss,
        sequence_parallel=uses_sequence_parallel(megatron),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        layernorm_epsilon=hf_config.rms_norm_eps,
        normalization="RMSNorm",
        # Of norms that transformer-engine fuses; the project's have classes.
        layernorm_zero_centered_gamma=model.family.style.zero_centred_norms,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity=override.recompute_granularity,
        recompute_method=override.recompute_method,
        recompute_num_layers=override.recompute_num_layers,
        recompute_modules=None if override.recompute_modules is None else list(override.recompute_modules),
        # Weights always come from a checkpoint, so none are initialised; the caller moves the model to its device.
        # Layers of transformer-engine are made there: on the host it makes a float32 copy of each.
        perform_initialization=False,
        use_cpu_initialization=is_local or device.kind == "cpu",
        transformer_impl=override.transformer_impl,
        fp8=None if megatron.fp8_emulate else override.fp8,
        fp8_recipe=override.fp8_recipe,
        # The fused kernels need CUDA extensions; without them one code path serves every device.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=override.gradient_accumulation_fusion,
        batch_p2p_comm=device.batched_p2p,
        batch_p2p_sync=False,  # a wait for the device after every message, against a fault of older torch
        **model.attention.megatron_settings(),
        **moe_settings(model, settings, groups.grid),
    )


def uses_sequence_parallel(megatron: MegatronConfig) -> bool:
    """Whether activations are split over TP ranks; a TP group of one has nothing to split."""
    return megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1


def layer_spec(config: TransformerConfig, vp_stage: int, hf_config: PretrainedConfig) -> TransformerBlockSubmodules:
    """The layers of one chunk of this rank's stage: Megatron's, with our attention, norms and experts."""
    first = get_transformer_layer_offset(config, vp_stage)
    model = Model.of(hf_config.to_dict())
    specs = {layer: one_layer(config, layer, hf_config) for layer in model.kinds}
    layers = model.layers[first : first + get_num_layers_to_build(config, vp_stage)]
    return TransformerBlockSubmodules(
        layer_specs=[specs[layer] for layer in layers], layer_norm=norm_of(model.family.style)
    )


def one_layer(config: TransformerConfig, layer: Layer, hf_config: PretrainedConfig) -> ModuleSpec:
    """The spec of one kind of layer: Megatron's, into which each part puts its module."""
    num_experts = config.num_moe_experts if layer.has_experts else None
    norm = norm_of(family_of(hf_config.architectures).style)
    spec = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    spec.submodules.input_layernorm = norm
    spec.submodules.pre_mlp_layernorm = norm
    for part in layer.parts:
        put_part(part, spec, config, hf_config)
    put_te_layers(spec, config.transformer_impl, has_experts=layer.has_experts)
    return spec


def build_language_model(
    hf_config: PretrainedConfig, config: TransformerConfig, groups: TrainGroups, vocab_multiple: int
) -> list[Chunk]:
    """The chunks of this rank's stage of the language model, weights not yet loaded. All ranks must call.

    The last stage returns hidden states [B, S, H]; `VocabHead` applies the head to the scored tokens only.
    """
    chunks = build_stage(hf_config, config, groups, vocab_multiple, tied=hf_config.tie_word_embeddings)
    if groups.is_last_stage:
        pass_hidden_states(head_of(chunks[-1]), groups.tp_group)
    return chunks


def build_value_model(
    hf_config: PretrainedConfig, config: TransformerConfig, groups: TrainGroups, vocab_multiple: int, head_seed: int
) -> list[Chunk]:
    """The chunks of a value model: the trunk, and a new head that maps a hidden state to one value. All ranks
    must call.
    """
    chunks = build_stage(hf_config, config, groups, vocab_multiple, tied=False)
    if groups.is_last_stage:
        replace_head(chunks[-1], ValueHead(config, head_seed, groups.tp_group))
    return chunks


FEWEST_ANGLES = 64
"""Positions of the shortest table of rotary angles."""


def num_angles(longest_sequence: Callable[..., int]) -> Callable[..., int]:
    """Wrap Megatron's `get_rotary_seq_len`: packed rows get a table of a power of two of positions.

    Megatron keeps the last 32 tables, and the longest segment of packed rows differs from row to row.
    """

    def rounded(context: Any, block: Any, inputs: Any, config: Any, packed_seq_params: Any = None) -> int:
        longest = longest_sequence(context, block, inputs, config, packed_seq_params)
        if packed_seq_params is None:
            return longest
        return int(max(FEWEST_ANGLES, 1 << (longest - 1).bit_length()))

    return rounded


def build_stage(
    hf_config: PretrainedConfig, config: TransformerConfig, groups: TrainGroups, vocab_multiple: int, tied: bool
) -> list[Chunk]:
    """One pipeline stage of a decoder, in the order its chunks are run.

    tied: the vocabulary head shares the embedding's weight. Raises ConfigError for an unsupported rotary embedding.
    """
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    chunks = [
        build_chunk(
            config,
            layer_spec(config, vp_stage, hf_config),
            num_tokens=padded_vocab_size(hf_config.vocab_size, vocab_multiple),
            num_positions=hf_config.max_position_embeddings,
            is_first=groups.is_first_stage and vp_stage == 0,
            is_last=groups.is_last_stage and vp_stage == num_chunks - 1,
            tied=tied,
            vp_stage=vp_stage,
        )
        for vp_stage in range(num_chunks)
    ]
    frequencies, style = rotary_frequencies(hf_config, config.kv_channels), family_of(hf_config.architectures).style
    for chunk in chunks:
        set_angles(chunk, frequencies, num_angles)
        scale_embedding(chunk, style)
        scale_layers(chunk, style)
        for _, layer in layers_of(chunk):
            if isinstance(layer.mlp, MLP):
                eps, norm = config.layernorm_epsilon, norm_of(style)
                norm_after = norm(config, config.hidden_size, eps) if style.norms_after else None
                gate_sparingly(layer.mlp, style.activation, norm_after)
    return chunks
