"""The parts that layers are made of. Each states its parameters and its costs once; needs no torch."""

from megatron_rl.model.parts.expert_mlp import Experts, ExpertsMLP, ExpertStacks, Scoring, SharedExperts
from megatron_rl.model.parts.gated_delta import GatedDelta
from megatron_rl.model.parts.gated_mlp import GatedMLP
from megatron_rl.model.parts.grouped_attention import AttentionShape, GroupedAttention, WideHeads
from megatron_rl.model.parts.latent import LatentAttention
from megatron_rl.model.parts.layer import Layer
from megatron_rl.model.parts.mixed_attention import Attention, MixedAttention
from megatron_rl.model.parts.model_shape import ModelShape
from megatron_rl.model.parts.param_spec import CORRECTION, Constant, ParamSpec, is_one_by_one
from megatron_rl.model.parts.part import FP32, AttentionPart, Cut, LayerBlock, LayerPart
from megatron_rl.model.parts.sink_attention import SinkAttention

__all__ = [
    "CORRECTION",
    "FP32",
    "Attention",
    "AttentionPart",
    "AttentionShape",
    "Constant",
    "Cut",
    "ExpertStacks",
    "Experts",
    "ExpertsMLP",
    "GatedDelta",
    "GatedMLP",
    "GroupedAttention",
    "LatentAttention",
    "Layer",
    "LayerBlock",
    "MixedAttention",
    "ModelShape",
    "ParamSpec",
    "LayerPart",
    "Scoring",
    "SharedExperts",
    "WideHeads",
    "SinkAttention",
    "is_one_by_one",
]
