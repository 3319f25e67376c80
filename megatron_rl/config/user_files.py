"""A key that names the user's own Python file. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.constraints import FilePath


@dataclass
class UserFileConfig:
    path: FilePath | None = None
    """Python file with your own function (a policy loss, an advantage estimator), or with the scorer class of that
    name."""
