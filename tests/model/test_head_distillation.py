"""Likeliest tokens, log-probs of given ones, distances of two heads, in chunks, against the dense form: one shard."""

from __future__ import annotations

import pytest
import torch
from dense_log_probs import random_case
from storage_meter import StorageMeter

from megatron_rl.losses.distillation import GeneralisedJSD, MixedKL
from megatron_rl.model import chunks as chunk_sizes
from megatron_rl.model.head_distillation import OtherHead, head_divergence, head_log_probs_at, head_top_k
from megatron_rl.model.log_probs import VocabSoftmax, head_log_probs

TOKENS, VOCAB, ROWS, TEMPERATURE = 7, 13, 16, 0.7


@pytest.fixture(params=[1, 40, 1 << 20], ids=["one token", "some", "all"])
def chunked(request, monkeypatch):
    """Chunks of few tokens, and of all."""
    monkeypatch.setattr(chunk_sizes, "FEWEST_LOGITS", request.param)


def dense(hidden, weight, vocab=VOCAB, cap=None):
    """Log-probs [N, vocab] in float64."""
    logits = hidden.double() @ weight.double().t()
    logits = logits if cap is None else cap * (logits / cap).tanh()
    return (logits / TEMPERATURE)[:, :vocab].log_softmax(-1)


@pytest.mark.parametrize("k", [1, 5, VOCAB])
def test_top_k_as_dense(tp_group, chunked, k):
    """Padding is never among them. Would not catch an error in what ranks bring together."""
    hidden, weight, _, _ = random_case(TOKENS, VOCAB, ROWS, 2.0, 0)
    ids, log_probs = head_top_k(hidden, weight, k, VocabSoftmax(VOCAB, TEMPERATURE, tp_group))
    values, expected = dense(hidden, weight).topk(k)
    assert ids.equal(expected)
    torch.testing.assert_close(log_probs.double(), values, atol=5e-6, rtol=5e-6)
    assert head_top_k(hidden[:0], weight, k, VocabSoftmax(VOCAB, 1.0, tp_group))[0].shape == (0, k)
    with pytest.raises(ValueError, match="likeliest"):
        head_top_k(hidden, weight, VOCAB + 1, VocabSoftmax(VOCAB, 1.0, tp_group))


@pytest.mark.parametrize("cap", [None, 3.0])
def test_log_probs_at_as_dense(tp_group, chunked, cap):
    """Values, and the gradients of any mix of them. Would not catch an error in the sum over ranks."""
    hidden, weight, _, _ = random_case(TOKENS, VOCAB, ROWS, 2.0, 1)
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:4] for _ in range(TOKENS)])
    mix = torch.randn(TOKENS, 4, generator=generator)
    hidden.requires_grad_(), weight.requires_grad_()
    found = head_log_probs_at(hidden, weight, ids, VocabSoftmax(VOCAB, TEMPERATURE, tp_group, cap))
    expected = dense(hidden, weight, cap=cap).gather(-1, ids)
    torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=5e-6)
    ours, theirs = (torch.autograd.grad((mix * each).sum(), (hidden, weight)) for each in (found, expected))
    for gradient, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other.float(), atol=2e-5, rtol=1e-4)


def test_ids_that_a_vocabulary_lacks_have_probability_0(tp_group):
    """In its padding, and beyond all rows. Would not catch a sampled token of this kind, of which there is none."""
    hidden, weight, _, _ = random_case(TOKENS, VOCAB, ROWS, 2.0, 1)
    ids = torch.tensor([VOCAB - 1, VOCAB, ROWS - 1, ROWS, ROWS + 70]).expand(TOKENS, 5)
    found = head_log_probs_at(hidden, weight, ids, VocabSoftmax(VOCAB, TEMPERATURE, tp_group))
    assert found.isneginf().tolist() == [[False, True, True, True, True]] * TOKENS


@pytest.mark.parametrize("kind", [MixedKL(0.0), MixedKL(0.3), MixedKL(1.0), GeneralisedJSD(0.4)], ids=repr)
@pytest.mark.parametrize("cap", [None, 3.0])
def test_divergence_as_dense(tp_group, chunked, kind, cap):
    """Values and gradients, of heads of other widths, where one has fewer tokens than rows. Would not catch an error in
    the sum over ranks.
    """
    hidden, weight, _, _ = random_case(TOKENS, VOCAB, ROWS, 2.0, 3)
    other_hidden, other_weight, _, _ = random_case(TOKENS, VOCAB - 2, ROWS, 2.0, 4, hidden_size=10)
    hidden.requires_grad_(), weight.requires_grad_()
    vocab, mix = VOCAB - 2, torch.randn(TOKENS, generator=torch.Generator().manual_seed(5))
    other = OtherHead(other_weight, VocabSoftmax(vocab, TEMPERATURE, tp_group))
    softmax = VocabSoftmax(vocab, TEMPERATURE, tp_group, cap)
    found = head_divergence(hidden, weight, softmax, other_hidden, other, kind)
    expected = kind.sums(dense(hidden, weight, vocab, cap), dense(other_hidden, other_weight, vocab))[0]
    torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=5e-6)
    ours, theirs = (torch.autograd.grad((mix * each).sum(), (hidden, weight)) for each in (found, expected))
    for gradient, other_gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other_gradient.float(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [MixedKL(0.0), MixedKL(0.5), MixedKL(1.0), GeneralisedJSD(0.5)], ids=repr)
def test_a_head_is_no_distance_from_itself(tp_group, chunked, kind):
    """Value and gradients are exactly 0. Would not catch a distance that is always 0."""
    hidden, weight, _, _ = random_case(TOKENS, VOCAB, ROWS, 2.0, 6)
    softmax = VocabSoftmax(VOCAB, TEMPERATURE, tp_group)
    other = OtherHead(weight.clone(), softmax)
    hidden.requires_grad_(), weight.requires_grad_()
    found = head_divergence(hidden, weight, softmax, hidden.detach().clone(), other, kind)
    assert found.abs().max() < 1e-7
    for gradient in torch.autograd.grad(found.sum(), (hidden, weight)):
        assert gradient.abs().max() < 1e-6


def peak_of(scores, hidden: torch.Tensor, weight: torch.Tensor, inputs: list[torch.Tensor]) -> int:
    """Most bytes that a forward and a backward pass make beside their inputs."""
    hidden, weight = (tensor.detach().requires_grad_() for tensor in (hidden, weight))
    with StorageMeter([hidden, weight, *inputs], lambda: 0) as meter:
        scores(hidden, weight).sum().backward()
    return meter.peak


@pytest.mark.parametrize("kind", [MixedKL(0.5), GeneralisedJSD(0.5)], ids=repr)
def test_two_heads_take_the_memory_of_one(tp_group, kind):
    """At most 1.3 of the log-prob pass, gradients and all, and far from tokens x vocabulary. Would not catch memory
    inside of a kernel.
    """
    num_tokens, size, vocab = 512, 128, 16384
    generator = torch.Generator().manual_seed(0)
    hidden, other_hidden = torch.randn(2, num_tokens, size, generator=generator).unbind()
    weight, other_weight = torch.randn(2, vocab, size, generator=generator).unbind()
    targets, softmax = torch.zeros(num_tokens, dtype=torch.int64), VocabSoftmax(vocab, 1.0, tp_group)
    other = OtherHead(other_weight, softmax)
    alone = peak_of(lambda h, w: head_log_probs(h, w, targets, softmax)[0], hidden, weight, [targets])
    inputs = [other_hidden, other_weight]
    both = peak_of(lambda h, w: head_divergence(h, w, softmax, other_hidden, other, kind), hidden, weight, inputs)
    assert both <= 1.3 * alone < 4 * num_tokens * vocab, (both, alone)
