"""Tokenizers of model folders."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.errors import ConfigError


def load_tokenizer(path: str, key: str = "actor_rollout_ref.model.path") -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. key: the configuration key of the folder. No code of a folder is run.

    Raises ConfigError if its files are damaged or do not go together.
    """
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # without, transformers asks the terminal
    except Exception as error:  # the library raises its own errors, and its parsers bare ones
        code = _own_code(Path(path) / "tokenizer_config.json")
        asked = f"it asks for code of its own, {code}, and no code of a folder is run; " if code else ""
        reason = f"{asked}{type(error).__name__}: {error!s:.500}"
        raise ConfigError(f"the tokenizer of {key}={path} cannot be loaded: {reason}") from error


def _own_code(file: Path) -> str:
    """The class of the folder's own code that makes its tokenizer; "" if it names none."""
    try:
        names = json.loads(file.read_text())["auto_map"]["AutoTokenizer"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return str(next((name for name in names if name), "")) if isinstance(names, list) else str(names)
