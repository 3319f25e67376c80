"""Log-prob and entropy from vocabulary shards, against the dense form in float64: here with one shard."""

import pytest
import torch
import torch.distributed as dist
from dense_log_probs import dense_gradients, dense_log_probs, random_case
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.model.log_probs import vocab_parallel_log_probs


@pytest.fixture(scope="module")
def tp_group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 5),
    vocab=st.integers(1, 20),
    padding=st.integers(0, 5),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    seed=st.integers(0, 999),
)
def test_values_and_gradients_agree_with_dense(tp_group, tokens, vocab, padding, scale, seed):
    """Both outputs and the gradient of any mix of them. Would not catch an error in the sum over ranks."""
    logits, targets, weights = random_case(tokens, vocab, vocab + padding, scale, seed)
    logits.requires_grad_()
    log_prob, entropy = vocab_parallel_log_probs(logits, targets, vocab, tp_group)
    assert log_prob.dtype == entropy.dtype == torch.float32
    for found, expected in zip((log_prob, entropy), dense_log_probs(logits, targets, vocab), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    assert log_prob.le(0).all() and entropy.ge(0).all()
    (gradient,) = torch.autograd.grad((weights[0] * log_prob + weights[1] * entropy).sum(), logits)
    torch.testing.assert_close(
        gradient.double(), dense_gradients(logits.detach(), targets, vocab, weights), atol=1e-6, rtol=1e-5
    )
    assert gradient[:, vocab:].eq(0).all()


@pytest.mark.parametrize("output", [0, 1], ids=["log_prob", "entropy"])
def test_each_output_has_a_gradient_alone(tp_group, output):
    """The other output unused, as without an entropy bonus. Would not catch a mix with a wrong sign."""
    logits, targets, _ = random_case(4, 7, 9, 1.0, seed=0)
    logits.requires_grad_()
    weights = torch.zeros(2, 4)
    weights[output] = 1
    (gradient,) = torch.autograd.grad(vocab_parallel_log_probs(logits, targets, 7, tp_group)[output].sum(), logits)
    torch.testing.assert_close(
        gradient.double(), dense_gradients(logits.detach(), targets, 7, weights), atol=1e-6, rtol=1e-5
    )


def test_two_tokens_by_hand(tp_group):
    """Odds 1:3 and 1:1 over two real rows of four. Would not catch an error that needs many rows."""
    logits = torch.tensor([[0.0, 1.0986123, 9.0, 9.0], [2.0, 2.0, 9.0, 9.0]])
    log_prob, entropy = vocab_parallel_log_probs(logits, torch.tensor([1, 0]), 2, tp_group)
    torch.testing.assert_close(log_prob, torch.tensor([0.75, 0.5]).log(), atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, torch.tensor([0.5623351, 0.6931472]), atol=1e-6, rtol=0)


def test_extreme_logits_stay_finite(tp_group):
    """Differences of 2e4 and equal huge logits. Would not catch infinite logits, which no model gives."""
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [1e4, 1e4, 1e4]], requires_grad=True)
    log_prob, entropy = vocab_parallel_log_probs(logits, torch.tensor([0, 0, 2]), 3, tp_group)
    assert log_prob.tolist() == pytest.approx([0.0, -2e4, -1.0986123])
    assert entropy.tolist() == pytest.approx([0.0, 0.0, 1.0986123])
    assert log_prob.le(0).all()
    (gradient,) = torch.autograd.grad((log_prob + entropy).sum(), logits)
    third = 1 / 3
    expected = torch.tensor([[0.0, 0.0, 0.0], [1.0, -1.0, 0.0], [-third, -third, 1 - third]])
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


def test_bfloat16_logits_give_float32_answers_and_keep_their_input(tp_group):
    """The gradient has the logits' dtype and the logits are not overwritten. Would not catch a lost digit in fp32."""
    logits, targets, _ = random_case(3, 6, 8, 1.0, seed=1)
    for dtype in (torch.bfloat16, torch.float32):
        for columns, vocab in ((8, 6), (6, 6)):
            given_logits = logits[:, :columns].to(dtype)
            leaf = given_logits.clone().requires_grad_()
            log_prob, entropy = vocab_parallel_log_probs(leaf, targets, vocab, tp_group)
            expected = dense_log_probs(given_logits, targets, vocab)
            torch.testing.assert_close(log_prob.double(), expected[0], atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(entropy.double(), expected[1], atol=1e-6, rtol=1e-6)
            assert torch.autograd.grad(log_prob.sum(), leaf)[0].dtype == dtype
            assert torch.equal(leaf, given_logits)
