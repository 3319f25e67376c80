"""Keys of a step's first and last tokens: prompts that are read once, long answers that do not hold a batch up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from megatron_rl.config.constraints import AtMost, Or


@dataclass
class LastTokens:
    """Part of the group `rollout`."""

    prefix_match_unit: Annotated[int | None, Or(None, "whole blocks"), Ge(1), AtMost(2**10)] = None
    """Samples of a prompt share what the engine has read of it up to a multiple of so many tokens; the name is vLLM's.
    null: whole blocks of the KV cache, so that a prompt shorter than a block is read once for every sample. The unit
    divides the tokens of a block; a small one shares more, and takes more work to look up. On CPUs alone."""
