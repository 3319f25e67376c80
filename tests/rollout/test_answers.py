"""What is read of vLLM's answers. The engine is imported where it is needed: whoever collects does not need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput


def flat(*numbers: tuple[int, float]) -> FlatLogprobs:
    """vLLM's own container, of one token and its log-prob in every step."""
    from vllm.logprobs import FlatLogprobs, Logprob

    found = FlatLogprobs()
    found.extend([{token: Logprob(number)} for token, number in numbers])
    return found


def answer(token_ids: list[int], reason: str, logprobs: FlatLogprobs | list | None) -> CompletionOutput:
    from vllm.outputs import CompletionOutput

    return CompletionOutput(
        index=0, text="", token_ids=token_ids, cumulative_logprob=None, logprobs=logprobs, finish_reason=reason
    )


@pytest.mark.parametrize("none", [None, []])
def test_log_probs_of_answers(none):
    """A whole one, and one without a token as an aborted request has it. Would not catch what vLLM aborts."""
    from megatron_rl.rollout.in_flight_requests import token_log_probs

    steps = flat((3, -0.5), (4, -0.25))
    assert token_log_probs(answer([3, 4], "stop", steps)) == [-0.5, -0.25]
    assert token_log_probs(answer([4], "length", steps[1:])) == [-0.25]
    assert token_log_probs(answer([], "abort", none)) == []


def test_log_probs_of_other_tokens_are_refused():
    """In another form, of another token, and missing. Would not catch two tokens' numbers exchanged."""
    from vllm.logprobs import Logprob

    from megatron_rl.rollout.in_flight_requests import token_log_probs

    for found in ([{3: Logprob(-0.5)}], flat((4, -0.5)), None):
        with pytest.raises(RuntimeError, match="not those of the tokens"):
            token_log_probs(answer([3], "stop", found))


def test_experts_of_tokens():
    """Some layers of some tokens, in a type that torch has; an engine that has returned none is refused.

    Would not catch another order of layers in the engine: `tests/parity` does.
    """
    import numpy

    from megatron_rl.rollout.in_flight_requests import experts_of_tokens

    rows = numpy.arange(12, dtype="uint16").reshape(2, 3, 2)
    found = experts_of_tokens(rows, [0, 2])
    assert (found.first, found.length) == (0, 2)
    assert found.part.dtype == torch.int16 and found.part.tolist() == [[[0, 1], [4, 5]], [[6, 7], [10, 11]]]
    assert experts_of_tokens(rows.astype("uint8"), [1]).part.dtype == torch.uint8
    with pytest.raises(RuntimeError, match="without the experts"):
        experts_of_tokens(None, [1])
