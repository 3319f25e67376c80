"""Ray, started on this machine for one run."""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from megatron_rl.controller.signals import keeping_sigterm_handler
from megatron_rl.errors import ConfigError
from third_party_patches import PatchError, apply_patches

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about this setting
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # answers of a failed call that nobody reads
}


def start(num_cpus: int, folder: Path) -> None:
    """Start Ray with its session in `folder` and a token of its own. Raises ConfigError for a version not known."""
    try:
        apply_patches("driver")
    except PatchError as error:
        raise ConfigError(str(error)) from None
    with _own_token():
        init(address="local", num_cpus=num_cpus, include_dashboard=False, _temp_dir=str(folder))


def init(**options: object) -> None:
    """`ray.init`, without its words and without its signal handler."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    with keeping_sigterm_handler():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


@contextmanager
def _own_token() -> Iterator[None]:
    """Offer Ray a token unless the user names one: it would write its own to the home folder, which may not exist."""
    if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = _token()
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]


@functools.cache
def _token() -> str:
    """The same for the whole life of this process, as Ray reads it once."""
    return secrets.token_hex(32)
