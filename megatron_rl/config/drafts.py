"""Keys of drafts: tokens that a rollout guesses, and the model checks together. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from annotated_types import Ge

from megatron_rl.config.constraints import OURS, AtMost, OneOf, Or

NGRAM, EARLIER, MTP = "ngram", "earlier", "mtp"


class MTPUse(Enum):
    """What becomes of a model's multi-token prediction (MTP) layer: not read; read by generation; and trained."""

    NONE = "none"
    FROZEN = "frozen"
    TRAINED = "trained"


@dataclass
class Drafts:
    """Part of the group `rollout`. The names are vLLM's."""

    speculative: Annotated[str | None, OneOf((NGRAM, EARLIER, MTP)), OURS] = None
    """ngram: where an answer's last tokens stand in its prompt, or earlier in it, what followed there is guessed,
    and checked in one engine step | earlier: or in answers of former epochs to the same prompt | mtp: the model's own
    multi-token prediction layer guesses | null: one token each step. The tokens that are drawn are the same."""
    num_speculative_tokens: Annotated[int, Ge(1), AtMost(128), OURS] = 3
    """Tokens guessed at once, at most."""
    prompt_lookup_min: Annotated[int, Ge(1), AtMost(2**10), OURS] = 2
    """Last tokens that must stand there before, at least."""
    prompt_lookup_max: Annotated[int, Ge(1), AtMost(2**10), OURS] = 4
    """Last tokens that are compared, at most: the place with the longest match counts. Of equal ones, ngram takes the
    first, and earlier what follows most of them."""
    earlier_answers_per_prompt: Annotated[int, Ge(1), AtMost(2**10), OURS] = 4
    """Last answers to a prompt, other in their tokens, that the controller keeps for speculative=earlier, in
    checkpoints too."""
    speculative_disable_by_batch_size: Annotated[int | None, Or(None, "never"), Ge(1), AtMost(2**20), OURS] = None
    """Nothing is guessed in an engine step with more requests than this; null: in every step."""
