"""Log-prob and entropy from hidden states and vocabulary shards, against the dense form in float64: two ranks."""

import pytest
import torch
import torch.distributed as dist
from dense_log_probs import dense_gradients, dense_log_probs, random_case
from ranks import run_ranks

from megatron_rl.model.log_probs import (
    VocabSoftmax,
    head_cross_entropy,
    head_log_probs,
    head_log_probs_alone,
    head_statistics,
)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

#  (tokens, vocabulary, rows, scale): no padding, some on rank 1, all of rank 1, and one that reaches into rank 0
CASES = [(5, 8, 8, 1.0), (5, 7, 8, 3.0), (4, 4, 8, 1.0), (4, 3, 8, 1.0), (6, 130, 192, 5.0), (3, 1, 2, 1.0)]


def compare_with_dense():
    """Every case on this rank's rows; returns the outputs, for comparison between ranks."""
    dist.init_process_group("gloo")
    outputs = []
    for seed, (tokens, vocab, rows, scale) in enumerate(CASES):
        hidden, whole, targets, mix = random_case(tokens, vocab, rows, scale, seed)
        mine = slice(dist.get_rank() * rows // 2, (dist.get_rank() + 1) * rows // 2)
        weight = whole[mine].clone().requires_grad_()
        hidden.requires_grad_()
        log_prob, entropy = head_log_probs(hidden, weight, targets, VocabSoftmax(vocab, 0.9, dist.group.WORLD))
        dense = dense_log_probs((hidden @ whole.t()).detach().double() / 0.9, targets, vocab)
        for found, expected in zip((log_prob, entropy), dense, strict=True):
            torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=5e-6)
        assert log_prob.le(0).all()
        softmax = VocabSoftmax(vocab, 0.9, dist.group.WORLD)
        again = head_statistics(hidden, weight, targets, softmax, ("entropy", "sum_pi_squared"))
        squares = again.sum_pi_squared
        probs = ((hidden @ whole.t()).detach().double() / 0.9)[:, :vocab].softmax(-1)
        torch.testing.assert_close(squares.double(), probs.square().sum(-1), atol=5e-6, rtol=5e-6)
        assert torch.equal(again.log_prob, log_prob) and not squares.requires_grad
        assert torch.equal(again.entropy, entropy)
        found = torch.autograd.grad((mix[0] * log_prob + mix[1] * entropy).sum(), (hidden, weight))
        dist.all_reduce(found[0])
        expected = dense_gradients(hidden, whole, targets, vocab, 0.9, mix)
        torch.testing.assert_close(found[0].double(), expected[0], atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(found[1].double(), expected[1][mine], atol=5e-5, rtol=1e-4)
        assert torch.equal(
            head_log_probs_alone(hidden, weight, targets, VocabSoftmax(vocab, 0.9, dist.group.WORLD)), log_prob
        )
        loss = head_cross_entropy(hidden, weight, targets, VocabSoftmax(vocab, 0.9, dist.group.WORLD))
        torch.testing.assert_close(loss.double(), -dense[0].sum(), atol=5e-5, rtol=5e-6)
        found = torch.autograd.grad(loss, (hidden, weight))
        dist.all_reduce(found[0])
        mix = torch.stack([torch.full((tokens,), -1.0), torch.zeros(tokens)])
        expected = dense_gradients(hidden, whole, targets, vocab, 0.9, mix)
        torch.testing.assert_close(found[0].double(), expected[0], atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(found[1].double(), expected[1][mine], atol=5e-5, rtol=1e-4)
        outputs.append((log_prob.tolist(), entropy.tolist(), squares.tolist()))

    extreme, row = torch.tensor([[1e4, -1e4], [-1e4, 1e4]]), torch.eye(2)[dist.get_rank(), None]
    log_prob, entropy = head_log_probs(extreme, row, torch.tensor([0, 0]), VocabSoftmax(2, 1.0, dist.group.WORLD))
    assert log_prob.tolist() == [0.0, -2e4] and entropy.tolist() == [0.0, 0.0]
    softmax = VocabSoftmax(2, 1.0, dist.group.WORLD)
    found = head_statistics(extreme, row, torch.tensor([0, 0]), softmax, ("sum_pi_squared",))
    assert found.sum_pi_squared.tolist() == [1.0, 1.0]
    dist.destroy_process_group()
    return outputs


def test_two_shards_agree_with_dense_and_with_each_other():
    """Values, sums of squares, this shard's rows of the gradient, equal outputs; cross-entropy and its gradients.

    Would not catch an error on three shards only.
    """
    first, second = run_ranks(2, compare_with_dense, timeout=100)
    assert first == second and len(first) == len(CASES)
