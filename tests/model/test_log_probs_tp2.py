"""Log-prob and entropy from vocabulary shards, against the dense form in float64: two ranks."""

import pytest
import torch
import torch.distributed as dist
from dense_log_probs import dense_gradients, dense_log_probs, random_case
from ranks import run_ranks

from megatron_rl.model.log_probs import vocab_parallel_log_probs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

#  (tokens, vocabulary, columns, scale): no padding, some on rank 1, all of rank 1, and one that reaches into rank 0
CASES = [(5, 8, 8, 1.0), (5, 7, 8, 3.0), (4, 4, 8, 1.0), (4, 3, 8, 1.0), (6, 130, 192, 5.0), (3, 1, 2, 1.0)]


def compare_with_dense():
    """Every case on this rank's columns; returns the outputs, for comparison between ranks."""
    dist.init_process_group("gloo")
    outputs = []
    for seed, (tokens, vocab, columns, scale) in enumerate(CASES):
        whole, targets, weights = random_case(tokens, vocab, columns, scale, seed)
        mine = slice(dist.get_rank() * columns // 2, (dist.get_rank() + 1) * columns // 2)
        logits = whole[:, mine].clone().requires_grad_()
        log_prob, entropy = vocab_parallel_log_probs(logits, targets, vocab, dist.group.WORLD)
        for found, expected in zip((log_prob, entropy), dense_log_probs(whole, targets, vocab), strict=True):
            torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
        assert log_prob.le(0).all()
        (gradient,) = torch.autograd.grad((weights[0] * log_prob + weights[1] * entropy).sum(), logits)
        dense = dense_gradients(whole, targets, vocab, weights)[:, mine]
        torch.testing.assert_close(gradient.double(), dense, atol=1e-6, rtol=1e-5)
        outputs.append((log_prob.tolist(), entropy.tolist()))

    extreme = torch.tensor([[1e4, -1e4], [-1e4, 1e4]])[dist.get_rank()].view(2, 1)
    log_prob, entropy = vocab_parallel_log_probs(extreme, torch.tensor([0, 0]), 2, dist.group.WORLD)
    assert log_prob.tolist() == [0.0, -2e4] and entropy.tolist() == [0.0, 0.0]
    dist.destroy_process_group()
    return outputs


def test_two_shards_agree_with_dense_and_with_each_other():
    """Values, this shard's columns of the gradient, equal outputs. Would not catch an error on three shards only."""
    first, second = run_ranks(2, compare_with_dense, timeout=100)
    assert first == second and len(first) == len(CASES)
