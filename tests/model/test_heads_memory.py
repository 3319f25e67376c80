"""What comparing two heads holds at once, beside the plan: chunks of logits, and the gradients of the weight."""

from __future__ import annotations

import pytest
import torch
from storage_meter import StorageMeter

from megatron_rl.losses.distillation import GeneralisedJSD, MixedKL
from megatron_rl.model.chunks import chunk_tokens
from megatron_rl.model.head_distillation import OtherHead, head_divergence, head_log_probs_at
from megatron_rl.model.log_probs import VocabSoftmax, head_log_probs
from megatron_rl.planning.activations import CHUNKS_BACKWARD

TOKENS, HIDDEN, OTHER, ROWS, TOP = 512, 256, 384, 16384, 64
KINDS = {"forward": MixedKL(0.0), "reverse": MixedKL(1.0), "mixed": MixedKL(0.3), "jsd": GeneralisedJSD(0.4)}


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("name", ["log-probs", "top-k", *KINDS])
def test_chunks_of_logits_are_those_of_the_plan(tp_group, name, soft_cap):
    """Forward and backward, with no tensor of tokens x vocabulary, beside numbers of each token.

    Would not catch what a GPU's kernels hold.
    """
    softmax = VocabSoftmax(ROWS, 0.7, tp_group, soft_cap)
    hidden, weight = (torch.randn(size, HIDDEN, requires_grad=True) for size in (TOKENS, ROWS))
    theirs, other = torch.randn(TOKENS, OTHER), OtherHead(torch.randn(ROWS, OTHER), softmax)
    targets = torch.randint(0, ROWS, (TOKENS, TOP))
    peaks = []
    with StorageMeter([hidden, weight, theirs, other.weight], lambda: 0) as meter:
        if name in KINDS:
            loss = head_divergence(hidden, weight, softmax, theirs, other, KINDS[name]).sum()
        elif name == "top-k":
            loss = head_log_probs_at(hidden, weight, targets, softmax).sum()
        else:
            loss = head_log_probs(hidden, weight, targets[:, 0], softmax)[0].sum()
        peaks.append(meter.peak)
        loss.backward()
    peaks.append(meter.peak - (ROWS + TOKENS) * HIDDEN * 4)
    chunk = chunk_tokens(HIDDEN, ROWS) * ROWS * 4
    of_top = TOKENS * TOP * 16 * (name == "top-k")
    assert chunk * 4 < TOKENS * ROWS * 4  # or nothing would be seen of chunks
    assert max(peaks) <= CHUNKS_BACKWARD * chunk + of_top + TOKENS * 1024
