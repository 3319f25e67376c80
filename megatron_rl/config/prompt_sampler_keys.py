"""Keys of a class of the user's that chooses the training prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.constraints import OURS, FilePath


@dataclass
class PromptSamplerConfig:
    """A class of the user's that chooses the training prompts."""

    path: Annotated[FilePath | None, OURS] = None
    """Python file with a class that chooses the training prompts (a curriculum). The class is created with (rows,
    batch_size, seed, **kwargs) and has next_indices() -> positions, update(positions, scores), state_dict() and
    load_state_dict(state)."""
    name: Annotated[str, OURS] = "PromptSampler"
    """Name of the class in data.sampler.path."""
    kwargs: Annotated[dict[str, Any], OURS] = field(default_factory=dict)
    """Further keyword arguments of the class in data.sampler.path."""
