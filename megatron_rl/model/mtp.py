"""The multi-token prediction (MTP) layer in training: on the last stage, next to the last chunk's own layers.

Legend: S columns of a block, B its rows, H hidden size, v rows of the vocabulary on this rank.

Its inputs are detached: the model's hidden states, the embedding and the head get no gradient from it, so the policy is
trained as without (decoupled training).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.model.decoder import Chunk, last_norm
from megatron_rl.model.families import Model
from megatron_rl.model.families.mtp_params import mtp_form, mtp_layer
from megatron_rl.model.gpt import one_layer
from megatron_rl.model.layer_specs import norm_of
from megatron_rl.model.mlp import gate_sparingly


class MTPLayer(MegatronModule):
    """DeepSeek-V3's MTP module (arXiv:2412.19437, section 2.2) around one of Megatron's layers.

    Megatron's own class rolls token ids on CUDA alone, and asks for an embedding that is trained.
    """

    def __init__(
        self, config: TransformerConfig, model: Model, hf_config: PretrainedConfig, vp_stage: int | None
    ) -> None:
        super().__init__(config=config)
        norm, hidden, eps = norm_of(model.family.style), config.hidden_size, config.layernorm_epsilon
        self.enorm = norm(config, hidden, eps)
        self.hnorm = norm(config, hidden, eps)
        self.reads_unnormed = mtp_form(model.family).reads_unnormed
        self.unnormed: Tensor | None = None
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False, dtype=config.params_dtype)
        # Every TP rank has all of it, as in the rollout engine, and its part of the sequence.
        vars(self.eh_proj.weight)["sequence_parallel"] = config.sequence_parallel
        spec = one_layer(config, mtp_layer(model.family, model.shape), hf_config)
        # Megatron adds the number of the stage's first layer.
        number = config.num_layers + 1 - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer: Any = build_module(spec, config=config, layer_number=number, vp_stage=vp_stage)
        if isinstance(self.transformer_layer.mlp, MLP):
            gate_sparingly(self.transformer_layer.mlp, model.family.style.activation, None)
        self.final_layernorm = norm(config, hidden, eps)

    def forward(self, hidden: Tensor, vectors: Tensor, angles: Tensor, segments: Any) -> Tensor:
        """hidden, vectors [S, B, H] -> [S, B, H], which the head reads. All TP ranks must call.

        hidden: the model's last, after its final norm; a layer that reads them unnormed takes those that `keep_input`
        kept in the same pass. vectors: the next tokens' embeddings; 0 at the first token of a
        sequence, as in the rollout engine. angles, segments: what Megatron passes to every layer.
        """
        if self.config.sequence_parallel:
            vectors = scatter_to_sequence_parallel_region(vectors)
        if self.reads_unnormed:
            assert self.unnormed is not None  # the last norm reads its input in the same pass
            hidden, self.unnormed = self.unnormed, None
        elif self.config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden)
        pair = [self.enorm(vectors), self.hnorm(hidden)]
        joined = self.eh_proj(torch.cat(pair[::-1] if self.reads_unnormed else pair, -1))
        out, _ = self.transformer_layer(joined, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=segments)
        out = self.final_layernorm(out)
        whole: Tensor = out
        if self.config.sequence_parallel:
            whole = gather_from_sequence_parallel_region(out, tensor_parallel_output_grad=False)
        return whole

    def keep_input(self, norm: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep the input of the model's last norm, [S', B, H], for the layer's own pass."""
        is_trained = torch.is_grad_enabled() and self.eh_proj.weight.requires_grad
        self.unnormed = inputs[0].detach() if is_trained else None


def add_mtp_layer(chunks: list[Chunk], model: Model, hf_config: PretrainedConfig) -> None:
    """Put the layer into the last chunk of the last stage; all ranks of that stage must call.

    Not as `mtp`, which is where Megatron's schedules look for a class of their own.
    """
    last = chunks[-1]
    last.mtp_layer = MTPLayer(last.config, model, hf_config, last.vp_stage)
    if last.mtp_layer.reads_unnormed:
        last_norm(last).register_forward_pre_hook(last.mtp_layer.keep_input)


@torch.no_grad()
def embedded(ids: Tensor, weight: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """ids int64 [B, S], this rank's rows of the embedding [v, H] -> [S, B, H]. All TP ranks must call."""
    own = ids - tp_group.rank() * len(weight)
    is_here = (own >= 0) & (own < len(weight))
    out = F.embedding(own.clamp(0, len(weight) - 1), weight) * is_here.unsqueeze(-1)
    if tp_group.size() > 1:
        dist.all_reduce(out, group=tp_group)
    return out.transpose(0, 1).contiguous()
