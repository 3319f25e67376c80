"""Log-prob and entropy from hidden states, in chunks, against the dense form in float64: here with one shard."""

import pytest
import torch
from dense_log_probs import dense_gradients, dense_log_probs, random_case
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.model import chunks as chunk_sizes
from megatron_rl.model.chunks import chunk_tokens
from megatron_rl.model.log_probs import LocalRows, VocabSoftmax, chunks, head_log_probs, head_statistics


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
def test_values_and_gradients_agree_with_dense(tp_group, tokens, vocab, padding, scale, temperature, fewest, seed):
    """Both outputs and the gradients of any mix of them, for chunks of any size.

    Would not catch an error in the sum over ranks.
    """
    hidden, weight, targets, mix = random_case(tokens, vocab, vocab + padding, scale, seed)
    hidden.requires_grad_(), weight.requires_grad_()
    before, chunk_sizes.FEWEST_LOGITS = chunk_sizes.FEWEST_LOGITS, fewest
    try:
        log_prob, entropy = head_log_probs(hidden, weight, targets, VocabSoftmax(vocab, temperature, tp_group))
        gradients = torch.autograd.grad((mix[0] * log_prob + mix[1] * entropy).sum(), (hidden, weight))
    finally:
        chunk_sizes.FEWEST_LOGITS = before
    assert log_prob.dtype == entropy.dtype == torch.float32
    dense = dense_log_probs((hidden @ weight.t()).detach().double() / temperature, targets, vocab)
    for found, expected in zip((log_prob, entropy), dense, strict=True):
        torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=5e-6)
    assert log_prob.le(0).all() and entropy.ge(-1e-6).all()
    expected = dense_gradients(hidden, weight, targets, vocab, temperature, mix)
    for found, dense in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found.double(), dense, atol=5e-5, rtol=1e-4)
    assert gradients[1][vocab:].eq(0).all()


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(0, 9), vocab=st.integers(1, 20), padding=st.integers(0, 5), scale=st.sampled_from([0.1, 5.0]))
def test_sums_of_squares_agree_with_dense(tp_group, tokens, vocab, padding, scale):
    """Of every token's distribution, with its entropy and without, in chunks, padding left out.

    Would not catch an error in the sum over ranks.
    """
    hidden, weight, targets, _ = random_case(tokens, vocab, vocab + padding, scale, seed=tokens)
    before, chunk_sizes.FEWEST_LOGITS = chunk_sizes.FEWEST_LOGITS, 2 * (vocab + padding)
    try:
        softmax = VocabSoftmax(vocab, 0.8, tp_group)
        both = head_statistics(hidden, weight, targets, softmax, ("sum_pi_squared", "entropy"))
        alone = head_statistics(hidden, weight, targets, softmax, ("sum_pi_squared",))
        expected, entropy = head_log_probs(hidden, weight, targets, VocabSoftmax(vocab, 0.8, tp_group))
    finally:
        chunk_sizes.FEWEST_LOGITS = before
    probs = ((hidden @ weight.t()).double() / 0.8)[:, :vocab].softmax(-1)
    torch.testing.assert_close(alone.sum_pi_squared.double(), probs.square().sum(-1), atol=5e-6, rtol=5e-6)
    assert torch.equal(both.sum_pi_squared, alone.sum_pi_squared) and torch.equal(both.entropy, entropy)
    assert torch.equal(alone.log_prob, expected) and alone.entropy is None


def test_chunks_cover_every_token_once():
    """Also where one token's logits are more than a chunk. Would not catch chunks that are too small."""
    for num_tokens, hidden_size, num_rows in ((0, 8, 10), (1, 8, 10), (1000, 3, 1 << 13), (5, 1, 1 << 21)):
        cut = chunks(num_tokens, hidden_size, num_rows)
        assert [token for chunk in cut for token in range(num_tokens)[chunk]] == list(range(num_tokens))


def test_tokens_of_a_chunk():
    """A quarter of the hidden size, or 2^20 logits, or one token. Would not catch a chunk that is slow."""
    assert chunk_tokens(8192, 16032) == 2048
    assert chunk_tokens(64, 512) == 2048
    assert chunk_tokens(2, 1 << 21) == 1


@pytest.mark.parametrize("output", [0, 1], ids=["log_prob", "entropy"])
def test_each_output_has_a_gradient_alone(tp_group, output):
    """The other output unused, as without an entropy bonus. Would not catch a mix with a wrong sign."""
    hidden, weight, targets, _ = random_case(4, 7, 9, 1.0, seed=0)
    mix = torch.zeros(2, 4)
    mix[output] = 1
    expected = dense_gradients(hidden, weight, targets, 7, 1.0, mix)
    hidden.requires_grad_(), weight.requires_grad_()
    answers = head_log_probs(hidden, weight, targets, VocabSoftmax(7, 1.0, tp_group))
    found = torch.autograd.grad(answers[output].sum(), (hidden, weight))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


def test_no_token_has_no_loss_and_no_gradient(tp_group):
    """A block of rows that only fill up a split. Would not catch a rank that leaves out the collectives."""
    hidden, weight = torch.zeros(0, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    log_prob, entropy = head_log_probs(
        hidden, weight, torch.zeros(0, dtype=torch.int64), VocabSoftmax(7, 1.0, tp_group)
    )
    (log_prob.sum() + entropy.sum()).backward()
    assert log_prob.shape == (0,) and weight.grad.eq(0).all()


def test_two_tokens_by_hand(tp_group):
    """Odds 1:3 and 1:1 over two real rows of four. Would not catch an error that needs many rows."""
    hidden = torch.tensor([[0.0, 1.0986123, 9.0, 9.0], [2.0, 2.0, 9.0, 9.0]])
    log_prob, entropy = head_log_probs(hidden, torch.eye(4), torch.tensor([1, 0]), VocabSoftmax(2, 1.0, tp_group))
    torch.testing.assert_close(log_prob, torch.tensor([0.75, 0.5]).log(), atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, torch.tensor([0.5623351, 0.6931472]), atol=1e-6, rtol=0)


def test_extreme_logits_stay_finite(tp_group):
    """Differences of 2e4 and equal huge logits. Would not catch infinite logits, which no model gives."""
    hidden = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [1e4, 1e4, 1e4]], requires_grad=True)
    log_prob, entropy = head_log_probs(hidden, torch.eye(3), torch.tensor([0, 0, 2]), VocabSoftmax(3, 1.0, tp_group))
    assert log_prob.tolist() == pytest.approx([0.0, -2e4, -1.0986123], abs=1e-3)
    assert entropy.tolist() == pytest.approx([0.0, 0.0, 1.0986123], abs=1e-3)
    assert log_prob.le(0).all()
    (gradient,) = torch.autograd.grad((log_prob + entropy).sum(), hidden)
    third = 1 / 3
    expected = torch.tensor([[0.0, 0.0, 0.0], [1.0, -1.0, 0.0], [-third, -third, 1 - third]])
    torch.testing.assert_close(gradient, expected, atol=1e-3, rtol=0)


def test_bfloat16_gives_float32_answers_and_gradients_of_its_own(tp_group):
    """Would not catch a lost digit in float32."""
    hidden, weight, targets, _ = random_case(3, 6, 8, 1.0, seed=1)
    hidden, weight = (tensor.bfloat16().requires_grad_() for tensor in (hidden, weight))
    log_prob, entropy = head_log_probs(hidden, weight, targets, VocabSoftmax(6, 1.0, tp_group))
    expected = dense_log_probs((hidden @ weight.t()).detach(), targets, 6)
    torch.testing.assert_close(log_prob.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], atol=1e-5, rtol=1e-5)
    for gradient in torch.autograd.grad(log_prob.sum(), (hidden, weight)):
        assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize("num_chunks", [1, 64])
def test_the_heads_gradient_does_not_round_more_with_more_chunks(tp_group, num_chunks):
    """bfloat16 against float64: 64 chunks are no worse than 1.5 times one. Added up in bfloat16 they are 10 times.

    Would not catch a sum over micro-batches in bfloat16, which Megatron's buffers add up.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2048, 32, generator=generator).bfloat16() + 1  # a mean that adds up over tokens
    weight = (0.1 * torch.randn(40, 32, generator=generator)).bfloat16().requires_grad_()
    targets = torch.randint(0, 40, (2048,), generator=generator)
    fewest = chunk_sizes.FEWEST_LOGITS
    chunk_sizes.FEWEST_LOGITS = 40 * 2048 // num_chunks
    try:
        assert len(list(chunks(2048, 32, 40))) == num_chunks
        log_prob, _ = head_log_probs(hidden, weight, targets, VocabSoftmax(40, 1.0, tp_group))
        (found,) = torch.autograd.grad(log_prob.sum(), weight)
    finally:
        chunk_sizes.FEWEST_LOGITS = fewest
    exact_weight = weight.detach().double().requires_grad_()
    picked = (hidden.double() @ exact_weight.t()).log_softmax(-1).gather(-1, targets[:, None])
    (exact,) = torch.autograd.grad(picked.sum(), exact_weight)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).norm() / exact.norm() < 0.004


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_rows_of_no_token(tp_group, shape):
    """As a rank has that shares sequences with others: no logit, and nothing is added. Would not catch a rank whose
    group is another.
    """
    rows = LocalRows(torch.randn(16, 8), VocabSoftmax(16, 1.0, tp_group))
    targets, grad = torch.zeros(shape, dtype=torch.int64), torch.zeros(0, 16)
    assert rows.take(torch.zeros(0, 16), targets).shape == shape
    rows.add(grad, targets, torch.zeros(shape))
    assert grad.shape == (0, 16)
