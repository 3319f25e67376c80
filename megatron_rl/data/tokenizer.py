"""Tokenizers of model folders."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.errors import ConfigError


def load_tokenizer(path: str, key: str = "actor_rollout_ref.model.path") -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. key: the configuration key of the folder.

    Raises ConfigError if its files are damaged or do not go together.
    """
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the library raises its own errors, and its parsers bare ones
        reason = f"{type(error).__name__}: {error!s:.500}"
        raise ConfigError(f"the tokenizer of {key}={path} cannot be loaded: {reason}") from error
