"""A placement as a configuration file, and as the command that starts it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.checkpoint.storage import writing
from megatron_rl.config.keys import value_of
from megatron_rl.config.load import load_config
from megatron_rl.config.setting import Setting, final_settings, nested
from megatron_rl.errors import ConfigError, shown
from megatron_rl.planning.layout_search.exact_ranking import Candidate
from megatron_rl.planning.layout_search.request import MapRequest


def tree_of(request: MapRequest, candidate: Candidate) -> dict[str, Any]:
    """Return nested groups: the file, kept values, then the placement; pools without a size in it are removed."""
    settings = [one for one in request.settings if not one.key.startswith("pools.")]
    settings += [Setting(key, value, "map") for key, value in candidate.settings.items()]
    return nested(final_settings(settings)[0])


def write_placement(request: MapRequest, candidate: Candidate, file: Path) -> None:
    """Write a candidate as a file for `train --config`.

    Raises StorageError where it cannot be written, and ConfigError where it reads back differently.
    """
    text = f"# {headline(request, candidate)}\n" + yaml.safe_dump(tree_of(request, candidate), sort_keys=False)
    with writing():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    read = load_config(file)
    different = [key for key, value in candidate.settings.items() if value_of(read, key) != value]
    if different:
        raise ConfigError(f"{file} does not read back as it was written: {', '.join(different)} differ")


def headline(request: MapRequest, candidate: Candidate) -> str:
    """Return the comment line of a file: where it comes from."""
    gpus, name = request.cluster.num_ranks, request.hardware.name
    return f"{request.path} on {gpus} {name}, placed by megatron-rl map: {candidate.seconds:.2f} s a step, estimated"


def command_of(request: MapRequest, candidate: Candidate, file: Path | None) -> list[str]:
    """Return the words that start a candidate, after the program's name.

    file: of `write_placement`; None: the configuration, with overrides.
    """
    if file is not None:
        return ["train", "--config", str(file)]
    return ["train", "--config", str(request.path), *request.overrides, *overrides_of(request, candidate)]


def overrides_of(request: MapRequest, candidate: Candidate) -> Iterable[str]:
    """Return the overrides of a placement: first removed pools, then its settings."""
    gone = sorted(name for name in request.config.pools if name not in candidate.config.pools)
    return [
        *(f"~pools.{name}" for name in gone),
        *(f"{key}={shown(value)}" for key, value in candidate.settings.items()),
    ]
