"""The dense float64 form of vocabulary-parallel log-probs, and cases to compare them on. Not a test module."""

from __future__ import annotations

import torch


def dense_log_probs(logits, targets, vocab_size):
    """(log-prob of the targets, entropy) over the first `vocab_size` columns of whole logits [N, V], in float64."""
    log_probs = logits.double()[:, :vocab_size].log_softmax(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def dense_gradients(logits, targets, vocab_size, weights):
    """d (w0 . log-prob + w1 . entropy) / d logits [N, V] by autograd of the dense form; weights [2, N]."""
    logits = logits.double().clone().requires_grad_()
    log_prob, entropy = dense_log_probs(logits, targets, vocab_size)
    return torch.autograd.grad((weights[0] * log_prob + weights[1] * entropy).sum(), logits)[0]


def random_case(num_tokens, vocab_size, num_columns, scale, seed):
    """(logits float32 [N, V] with large numbers in padding columns, targets [N], weights [2, N])."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_columns, generator=generator) * scale
    logits[:, vocab_size:] = 50.0
    targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
    return logits, targets, torch.randn(2, num_tokens, generator=generator)
