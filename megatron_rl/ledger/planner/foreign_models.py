"""What models ask for that is not here, by the features' names; read from config.json alone."""

from __future__ import annotations

import fnmatch
from functools import cache
from importlib import resources
from typing import Any

import yaml

from megatron_rl.ledger.planner.config_json import ConfigJsonError, read_config_json
from megatron_rl.ledger.planner.hub_cache import model_folder


@cache
def _features() -> dict[str, str]:
    text = resources.files("megatron_rl.config.foreign").joinpath("architectures.yaml").read_text()
    return dict(yaml.safe_load(text))


def feature_of(architecture: str) -> str:
    """What a model of an unknown architecture needs."""
    return next(feature for pattern, feature in _features().items() if fnmatch.fnmatchcase(architecture, pattern))


def model_facts(path: str) -> dict[str, Any]:
    """config.json of a folder, or of the local cache's model of that name; empty where none can be read."""
    try:
        return read_config_json(model_folder(path) / "config.json")
    except (ConfigJsonError, OSError):
        return {}
