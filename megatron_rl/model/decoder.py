"""Megatron's model class, and where the parts of one are: the only file that depends on which class it is.

A chunk is the part of a decoder that one virtual stage computes: the layers of its stage, the embedding where it is the
first, the last norm and the head where it is the last. Numbers of layers count over the whole model, from 0, as in
config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

Chunk: TypeAlias = GPTModel
"""The type of a chunk."""


def build_chunk(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules,
    *,
    num_tokens: int,
    num_positions: int,
    is_first: bool,
    is_last: bool,
    tied: bool,
    vp_stage: int,
) -> Chunk:
    """A chunk with the layers of `spec`, weights not yet loaded. All ranks must call.

    num_tokens: rows of the padded vocabulary, over all TP ranks. tied: the head has the weight of the embedding.
    """
    return GPTModel(
        config,
        spec,
        vocab_size=num_tokens,
        max_sequence_length=num_positions,
        pre_process=is_first,
        post_process=is_last,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )


def unwrapped(model: Any) -> Chunk:
    """The chunk inside of what Megatron wraps around it, such as its data parallelism."""
    chunk: Chunk = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
    return chunk


def layers_of(chunk: Chunk) -> Iterator[tuple[int, Any]]:
    """(Number, layer) of each layer of a chunk."""
    return ((layer.layer_number - 1, layer) for layer in chunk.decoder.layers)


def first_layer(chunk: Chunk) -> int:
    """The number of a chunk's first layer."""
    number, _ = next(layers_of(chunk))
    return number


def embedding_of(chunk: Chunk) -> torch.nn.Module | None:
    """The embedding; None where another chunk has it."""
    return chunk.embedding if chunk.pre_process else None


def embedding_weight(chunk: Chunk) -> Tensor:
    """This TP rank's rows [v, H] of the embedding of a first chunk."""
    weight: Tensor = chunk.embedding.word_embeddings.weight
    return weight


def last_norm(chunk: Chunk) -> torch.nn.Module:
    """The norm after the layers of a last chunk."""
    norm: torch.nn.Module = chunk.decoder.final_layernorm
    return norm


def head_of(chunk: Chunk) -> Any:
    """The module that a last chunk ends with."""
    return chunk.output_layer


def replace_head(chunk: Chunk, head: torch.nn.Module) -> None:
    """Let a last chunk end with another module."""
    chunk.output_layer = head


def head_weight(chunk: Chunk) -> Tensor:
    """This TP rank's rows [v, H] of the head of a last chunk; with tied embeddings they are the embedding's."""
    shared = chunk.share_embeddings_and_output_weights
    weight: Tensor = chunk.shared_embedding_or_output_weight() if shared else chunk.output_layer.weight
    return weight


def set_angles(
    chunk: Chunk, frequencies: Tensor, num_angles: Callable[[Callable[..., int]], Callable[..., int]]
) -> None:
    """Give a chunk its rotary frequencies, float32 [turned / 2], and another length of its table of angles."""
    chunk.rotary_pos_emb.inv_freq = frequencies
    # All positions have angles here; the segments of a context-parallel rank specify which it needs.
    chunk.rotary_pos_emb.cp_group = None
    chunk.rotary_pos_emb.get_rotary_seq_len = num_angles(chunk.rotary_pos_emb.get_rotary_seq_len)


def angles_per_head(chunk: Chunk) -> int:
    """How many rotary angles a token has."""
    return len(chunk.rotary_pos_emb.inv_freq)


def angles_of(chunk: Chunk, length: int, segments: Any) -> Tensor:
    """The angles [length, 1, 1, D] of all positions; of packed segments the longest one decides how many."""
    if segments is not None:
        length = chunk.rotary_pos_emb.get_rotary_seq_len(None, None, None, chunk.config, segments)
    angles: Tensor = chunk.rotary_pos_emb(length, packed_seq=segments is not None)
    return angles
