"""Keys of speculative decoding: draft tokens that the model verifies together in one engine step. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from annotated_types import Ge

from megatron_rl.config.constraints import OURS, AtMost, OneOf, Or

NGRAM, EARLIER, MTP = "ngram", "earlier", "mtp"


class MTPUse(Enum):
    """How a model's multi-token prediction (MTP) layer is used: not at all; by generation; by generation, and
    trained."""

    NONE = "none"
    FROZEN = "frozen"
    TRAINED = "trained"


@dataclass
class Drafts:
    """Part of the group `rollout`. The names are vLLM's."""

    speculative: Annotated[str | None, OneOf((NGRAM, EARLIER, MTP)), OURS] = None
    """Speculative decoding: where draft tokens come from. ngram: what followed the last tokens where they occurred
    before, in the prompt or the response (prompt lookup) | earlier: also in responses of earlier epochs to the same
    prompt | mtp: the model's multi-token prediction layer | null: none, one token per engine step. Samples are the
    same with and without."""
    num_speculative_tokens: Annotated[int, Ge(1), AtMost(128), OURS] = 3
    """Largest number of draft tokens per engine step and request."""
    prompt_lookup_min: Annotated[int, Ge(1), AtMost(2**10), OURS] = 2
    """ngram, earlier: smallest number of last tokens that must have occurred before."""
    prompt_lookup_max: Annotated[int, Ge(1), AtMost(2**10), OURS] = 4
    """ngram, earlier: largest number of last tokens that are compared; the longest match wins. Among equal matches
    ngram takes the first one, earlier the most frequent continuation."""
    earlier_answers_per_prompt: Annotated[int, Ge(1), AtMost(2**10), OURS] = 4
    """speculative=earlier: number of last different responses to a prompt that the controller keeps, also in
    checkpoints."""
    speculative_disable_by_batch_size: Annotated[int | None, Or(None, "never"), Ge(1), AtMost(2**20), OURS] = None
    """No draft tokens in an engine step with more requests than this; null: in every step."""
