"""From vLLM's answers to our record. The engine is imported where it is needed: whoever collects does not need it."""

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
def test_answers_become_rows(none):
    """A whole one, one without a token as an aborted request has it, one cut off. Would not catch what vLLM aborts."""
    from megatron_rl.rollout.engine import to_record

    steps = flat((3, -0.5), (4, -0.25))
    answers = [answer([3, 4], "stop", steps), answer([], "abort", none), answer([4], "length", steps[1:])]
    record = to_record(answers)
    assert [row.tolist() for row in record.response_ids.unbind()] == [[3, 4], [], [4]]
    assert record.response_ids.dtype == torch.int64
    assert [row.tolist() for row in record.rollout_log_probs.unbind()] == [[-0.5, -0.25], [], [-0.25]]
    assert record.truncated.tolist() == [False, False, True]
    lone = to_record([answer([], "abort", none)])
    assert lone.response_ids.dtype == torch.int64 and lone.rollout_log_probs.dtype == torch.float32


def test_log_probs_of_other_tokens_are_refused():
    """In another form, of another token, and missing. Would not catch two tokens' numbers exchanged."""
    from vllm.logprobs import Logprob

    from megatron_rl.rollout.engine import to_record

    for found in ([{3: Logprob(-0.5)}], flat((4, -0.5)), None):
        with pytest.raises(RuntimeError, match="not those of the tokens"):
            to_record([answer([3], "stop", found)])
