"""Cross-entropy and log-probs without entropy, against the dense form in float64 and against those with it."""

import pytest
import torch
from dense_log_probs import dense_gradients, dense_log_probs, random_case
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.model import chunks as chunk_sizes
from megatron_rl.model.log_probs import VocabSoftmax, head_cross_entropy, head_log_probs, head_log_probs_alone


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(1, 20),
    padding=st.integers(0, 5),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    temperature=st.sampled_from([1.0, 0.7]),
    fewest=st.integers(1, 60),
    seed=st.integers(0, 999),
)
def test_cross_entropy_agrees_with_dense(tp_group, tokens, vocab, padding, scale, temperature, fewest, seed):
    """Value and gradients of a multiple of it, for chunks of any size. Would not catch an error in sums over ranks."""
    hidden, weight, targets, _ = random_case(tokens, vocab, vocab + padding, scale, seed)
    hidden.requires_grad_(), weight.requires_grad_()
    before, chunk_sizes.FEWEST_LOGITS = chunk_sizes.FEWEST_LOGITS, fewest
    try:
        loss = head_cross_entropy(hidden, weight, targets, VocabSoftmax(vocab, temperature, tp_group))
        gradients = torch.autograd.grad(loss * 0.3, (hidden, weight))
    finally:
        chunk_sizes.FEWEST_LOGITS = before
    dense, _ = dense_log_probs((hidden @ weight.t()).detach().double() / temperature, targets, vocab)
    torch.testing.assert_close(loss.double(), -dense.sum(), atol=5e-5, rtol=5e-6)
    mix = torch.stack([torch.full((tokens,), -0.3), torch.zeros(tokens)])
    expected = dense_gradients(hidden, weight, targets, vocab, temperature, mix)
    for found, dense in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found.double(), dense, atol=5e-5, rtol=1e-4)
    assert gradients[1][vocab:].eq(0).all()


@pytest.mark.parametrize("soft_cap", [None, 1.2])
def test_log_probs_without_entropy_are_the_same_bit_for_bit(tp_group, soft_cap):
    """And their gradients, and those of cross-entropy within rounding. Would not catch what both get wrong."""
    hidden, weight, targets, mix = random_case(40, 60, 64, 3.0, seed=2)
    hidden.requires_grad_(), weight.requires_grad_()
    alone = head_log_probs_alone(hidden, weight, targets, VocabSoftmax(60, 0.7, tp_group, soft_cap))
    both, _ = head_log_probs(hidden, weight, targets, VocabSoftmax(60, 0.7, tp_group, soft_cap))
    assert torch.equal(alone, both)
    found, expected = (torch.autograd.grad((mix[0] * one).sum(), (hidden, weight)) for one in (alone, both))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    loss = head_cross_entropy(hidden, weight, targets, VocabSoftmax(60, 0.7, tp_group, soft_cap))
    found = torch.autograd.grad(loss, (hidden, weight))
    summed = torch.autograd.grad(
        -head_log_probs(hidden, weight, targets, VocabSoftmax(60, 0.7, tp_group, soft_cap))[0].sum(), (hidden, weight)
    )
    for ours, theirs in zip(found, summed, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_cross_entropy_by_hand(tp_group):
    """Odds 1:3 and 1:1 over two real rows of four. Would not catch an error that needs many rows."""
    hidden = torch.tensor([[0.0, 1.0986123, 9.0, 9.0], [2.0, 2.0, 9.0, 9.0]], requires_grad=True)
    loss = head_cross_entropy(hidden, torch.eye(4), torch.tensor([1, 0]), VocabSoftmax(2, 1.0, tp_group))
    assert loss.item() == pytest.approx(0.2876821 + 0.6931472, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, hidden)
    expected = torch.tensor([[0.25, -0.25, 0.0, 0.0], [-0.5, 0.5, 0.0, 0.0]])
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


def test_no_token_has_no_loss_and_no_gradient(tp_group):
    """A block of rows that only fill up a split. Would not catch a rank that leaves out the collectives."""
    hidden, weight = torch.zeros(0, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    loss = head_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64), VocabSoftmax(7, 1.0, tp_group))
    loss.backward()
    assert loss.item() == 0.0 and weight.grad.eq(0).all() and hidden.grad.shape == (0, 6)


def test_a_second_backward_is_refused(tp_group):
    """Its gradients were used up. Would not catch a second forward pass before the first one's backward."""
    hidden, weight, targets, _ = random_case(4, 7, 9, 1.0, seed=0)
    loss = head_cross_entropy(hidden.requires_grad_(), weight, targets, VocabSoftmax(7, 1.0, tp_group))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bfloat16_gives_a_float32_loss_and_gradients_of_its_own(tp_group):
    """Would not catch a lost digit in float32."""
    hidden, weight, targets, _ = random_case(3, 6, 8, 1.0, seed=1)
    hidden, weight = (tensor.bfloat16().requires_grad_() for tensor in (hidden, weight))
    loss = head_cross_entropy(hidden, weight, targets, VocabSoftmax(6, 1.0, tp_group))
    expected, _ = dense_log_probs((hidden @ weight.t()).detach(), targets, 6)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), -expected.sum(), atol=1e-5, rtol=1e-5)
    mix = torch.stack([torch.full((3,), -1.0), torch.zeros(3)])
    dense = dense_gradients(hidden, weight, targets, 6, 1.0, mix)
    for gradient, exact in zip(torch.autograd.grad(loss, (hidden, weight)), dense, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("function", [head_cross_entropy, head_log_probs_alone])
def test_a_frozen_head_has_no_gradient(tp_group, function, monkeypatch):
    """Hidden states' gradient is the same bit for bit, and nothing of the weight's size is made for the weight's.

    Would not catch what is made by other means.
    """
    hidden, weight, targets, _ = random_case(40, 60, 64, 3.0, seed=3)
    hidden.requires_grad_()
    made, zeros_like, gradients = [], torch.zeros_like, []
    monkeypatch.setattr(
        torch, "zeros_like", lambda *like, **options: made.append(like[0].shape) or zeros_like(*like, **options)
    )
    for is_trained in (True, False):
        made.clear()
        loss = function(hidden, weight.requires_grad_(is_trained), targets, VocabSoftmax(60, 0.7, tp_group)).sum()
        gradients.append(torch.autograd.grad(loss, hidden)[0])
        assert (weight.shape in made) is is_trained
    assert torch.equal(*gradients)
