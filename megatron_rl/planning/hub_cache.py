"""Find models by their Hugging Face Hub names in the local cache; nothing is downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.json_files import UnreadableFileError
from megatron_rl.config.keys import put, value_of
from megatron_rl.config.roles import roles_of
from megatron_rl.config.schema import RunConfig

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(path: str) -> bool:
    """Return whether a path can only be ORGANISATION/MODEL: neither this folder nor its parent exists."""
    return HUB_ID.fullmatch(path) is not None and not Path(path).exists() and not Path(path).parent.is_dir()


def model_folder(path: str) -> ModelFolder:
    """Return the folder of a model; for a Hub name in the local cache the folder there."""
    return ModelFolder((cached_model(path) if is_hub_id(path) else None) or path)


def model_facts(path: str) -> dict[str, Any]:
    """Return the settings of a folder or of a model in the local Hub cache; {} where they cannot be read."""
    try:
        return model_folder(path).settings
    except (UnreadableFileError, OSError):
        return {}


def cached_model(name: str) -> Path | None:
    """Return the newest snapshot of a model in the local cache; None if there is none."""
    from huggingface_hub import try_to_load_from_cache  # reads where the cache is from the environment

    file = try_to_load_from_cache(name, "config.json")
    return Path(file).parent if isinstance(file, str) else None


def with_local_models(config: RunConfig) -> RunConfig:
    """Replace Hub names in `config` by their folders in the local cache, and return it."""
    roles = list(roles_of(config))
    texts = [f"{role.key}.model.input_tokenizer" for role in roles if role.reads_text]
    for key in dict.fromkeys([*(role.model_key for role in roles), *texts]):
        path = value_of(config, key)
        folder = cached_model(path) if isinstance(path, str) and is_hub_id(path) else None
        if folder is not None:
            put(config, key, str(folder))
    return config
