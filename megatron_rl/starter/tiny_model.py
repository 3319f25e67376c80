"""A tiny model with random weights, for a project without a model: it knows nothing, and trains in seconds."""

from __future__ import annotations

from pathlib import Path

SPECIAL_TOKENS = ("<pad>", "<eos>")


def write_tiny_model(folder: Path, seed: int = 0) -> None:
    """Write a Qwen2 of 0.4 M parameters and a tokenizer of bytes as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *characters])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    pad, eos = SPECIAL_TOKENS
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, eos_token=eos).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
