"""From vLLM's answers to our record."""

from __future__ import annotations

import pytest
import torch
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput

from megatron_rl.rollout.engine import to_record


def answer(token_ids: list[int], reason: str, logprobs: list | None) -> CompletionOutput:
    return CompletionOutput(
        index=0, text="", token_ids=token_ids, cumulative_logprob=None, logprobs=logprobs, finish_reason=reason
    )


@pytest.mark.parametrize("none", [None, []])
def test_answers_become_rows(none):
    """A whole one, one without a token as an aborted request has it, one cut off. Would not catch what vLLM aborts."""
    steps = [{3: Logprob(-0.5), 9: Logprob(-9.0)}, {4: Logprob(-0.25)}]
    answers = [answer([3, 4], "stop", steps), answer([], "abort", none), answer([4], "length", steps[1:])]
    record = to_record(answers)
    assert [row.tolist() for row in record.response_ids.unbind()] == [[3, 4], [], [4]]
    assert record.response_ids.dtype == torch.int64
    assert [row.tolist() for row in record.rollout_log_probs.unbind()] == [[-0.5, -0.25], [], [-0.25]]
    assert record.truncated.tolist() == [False, False, True]
    lone = to_record([answer([], "abort", none)])
    assert lone.response_ids.dtype == torch.int64 and lone.rollout_log_probs.dtype == torch.float32
