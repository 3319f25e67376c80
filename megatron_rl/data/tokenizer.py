"""Tokenizers of model folders."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from megatron_rl.errors import ConfigError


def _read(folder: str | Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a model folder as transformers does; no code of a folder is run.

    Where transformers does not know the model_type of config.json, as of Kimi-K2, the tokenizer's own file decides:
    transformers would read such a config.json without a class, and fail at its rotary embedding.
    """
    try:
        kind = json.loads((Path(folder) / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        kind = None
    options = {} if kind is None or kind in CONFIG_MAPPING else {"config": PreTrainedConfig()}
    # Without trust_remote_code=False transformers asks the terminal.
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)


def load_tokenizer(path: str, key: str = "actor_rollout_ref.model.path") -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. key: the configuration key of the folder. No code of a folder is run.

    Raises ConfigError if its files are damaged or do not go together.
    """
    try:
        return _read(path)
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
