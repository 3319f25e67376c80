"""Rules of the keys under `ptx`: files and lengths."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.validate import is_path_or_paths
from megatron_rl.errors import Violation
from megatron_rl.planning.file_rules import pretraining_file_problems
from megatron_rl.planning.folder_checks import ModelSizes
from megatron_rl.planning.length_rules import pretraining_length_problems

COEF, FILES = "ptx.coef", "ptx.files"
USUAL_COEF = 0.05
"""OpenRLHF's default."""


def pretraining_problems(
    config: RunConfig, models: list[ModelSizes], *, config_only: bool = False
) -> Iterable[Violation]:
    """Every violation. models: the models that could be read."""
    keys = config.ptx
    if not keys.coef > 0:
        if keys.files is not None:
            rule = f"is of no use with {COEF}={keys.coef:g}: nothing is learned from these files"
            yield Violation({FILES: keys.files}, rule, {COEF: USUAL_COEF})
        return
    if not is_path_or_paths(keys.files):
        rule = f"must be a path or a list of at least one path, as {COEF}={keys.coef:g}"
        yield Violation({FILES: keys.files}, rule, {COEF: 0.0} if keys.files is None else {})
    elif not config_only:
        yield from pretraining_file_problems(config)
    yield from pretraining_length_problems(config, models)
