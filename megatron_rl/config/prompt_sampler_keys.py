"""Keys of a class of the user's that chooses the training prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.constraints import OURS, FilePath


@dataclass
class PromptSamplerConfig:
    """A class of the user's that chooses the training prompts."""

    path: Annotated[FilePath | None, OURS] = None
    """Python file with the class: next_indices() -> positions, update(positions, scores), state_dict() and
    load_state_dict(state). It is made with (rows, batch_size, seed, **kwargs)."""
    name: Annotated[str, OURS] = "PromptSampler"
    """Class in that file."""
    kwargs: Annotated[dict[str, Any], OURS] = field(default_factory=dict)
    """Keyword arguments with which it is made."""
