"""The dense float64 form of log-probs from hidden states, and cases to compare them on. Not a test module."""

from __future__ import annotations

import torch


def dense_log_probs(logits, targets, vocab_size):
    """(log-prob of the targets, entropy) over the first `vocab_size` columns of whole logits [N, V], in float64."""
    log_probs = logits.double()[:, :vocab_size].log_softmax(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def dense_gradients(hidden, weight, targets, vocab_size, temperature, mix):
    """d (mix0 . log-prob + mix1 . entropy) / d (hidden [N, H], weight [V, H]) of the dense form; mix [2, N]."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    log_prob, entropy = dense_log_probs(hidden @ weight.t() / temperature, targets, vocab_size)
    return torch.autograd.grad((mix[0] * log_prob + mix[1] * entropy).sum(), (hidden, weight))


def random_case(num_tokens, vocab_size, num_rows, scale, seed, hidden_size=6):
    """(hidden [N, H], weight [V, H] with large numbers in padding rows, targets [N], mix [2, N]), float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    weight = torch.randn(num_rows, hidden_size, generator=generator) * scale / hidden_size**0.5
    weight[vocab_size:] = 50.0
    targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(2, num_tokens, generator=generator)
