"""Keys of a judge: a generating model whose verdict in words is a reward. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le

from megatron_rl.config.constraints import AtMost, NotNegative, OneOf, Or, Size
from megatron_rl.config.distillation_keys import SELF as SELF

SINGLE, PAIRWISE, GROUP, RUBRIC = FORMS = ("single", "pairwise", "group", "rubric")
"""What a judge is shown at once: a response, two of a prompt, all of a prompt, a response and one criterion."""

QUESTION, GROUND_TRUTH = "question", "ground_truth"
RESPONSE, RESPONSE_A, RESPONSE_B, RESPONSES = "response", "response_a", "response_b", "responses"
CRITERION = "criterion"
FIELDS = {
    SINGLE: (RESPONSE,),
    PAIRWISE: (RESPONSE_A, RESPONSE_B),
    GROUP: (RESPONSES,),
    RUBRIC: (RESPONSE, CRITERION),
}
"""Form -> the places that its prompt must have; `{question}` and `{ground_truth}` may stand in each."""
PLACES = (QUESTION, GROUND_TRUTH, RESPONSE, RESPONSE_A, RESPONSE_B, RESPONSES, CRITERION)
PLACE = re.compile("{(" + "|".join(PLACES) + ")}")
"""A place in a prompt. Other braces are text."""


def places_of(prompt: str) -> list[str]:
    """Return the places of a prompt, in order."""
    return PLACE.findall(prompt)


@dataclass
class JudgeConfig:
    prompt: str | None = None
    """What the judge is asked, as the message of a user, with {question}, {response} and {ground_truth} where these go.
    null: the reward model is a classifier. Not null: model.path is a language model, or `self`, the policy."""
    form: Annotated[str, OneOf(FORMS)] = SINGLE
    """What the judge reads at once: single: {response} | pairwise: {response_a} and {response_b}, every two responses
    to a prompt in both orders; the score is the share that it wins | group: {responses}, all responses to a prompt,
    numbered; its verdict is a number for each | rubric: {response} and one {criterion} of extra_info[rubric]; the score
    is the weighted share of criteria."""
    verdicts: dict[str, Any] = field(default_factory=dict)
    """Words of the judge with their scores, such as {good: 1, bad: 0}; {}: yes is 1 and no is 0, pairwise A is 1 and B
    is 0. With `scale` and in groups the verdict is a number, and no word counts."""
    scale: list[float] | None = None
    """[lowest, highest]: the verdict is a number in this range, which becomes a score from 0 to 1; null: a word of
    `verdicts`."""
    mark: str = ""
    """The verdict is what comes after the last occurrence of this text, such as `Verdict:`; empty: the last word, or
    number, of all that the judge has written."""
    retries: Annotated[int, Ge(0), Le(16)] = 2
    """Further attempts where the judge's text has no verdict, with another seed, and at temperature 1 where
    temperature=0."""
    failed_score: float = 0.0
    """Score of a response whose judge has given no verdict in any attempt; it is that of such a criterion, too."""
    recorded: bool = False
    """Take the verdicts from the record of the run that trainer.rollouts_from or --replay names; the judge is not
    started. False: a replay takes them from there, and other runs ask."""
    temperature: NotNegative = 0.0
    """Sampling temperature of the judge; 0: the likeliest tokens."""
    top_p: Annotated[float, Ge(0), Le(1)] = 1.0
    """Nucleus sampling of the judge."""
    top_k: Annotated[int, Ge(1), Or(-1, "all tokens")] = -1
    """Tokens of which the judge may sample; -1: all."""
    max_prompt_length: Size = 2048
    """Most tokens that the judge reads. A longer prompt loses the middle of its longest responses, which is counted."""
    max_response_length: Size = 16
    """Most tokens that the judge writes."""
    kv_cache_memory_bytes: Annotated[int, Ge(1), AtMost(1 << 50)] = 1 << 26
    """Bytes of the KV cache of each of the judge's ranks."""
    max_num_seqs: Annotated[int, Ge(1), AtMost(2**20)] = 256
    """Questions that a replica of the judge works on at the same time."""
