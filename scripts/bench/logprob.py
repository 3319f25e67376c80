"""What do log-probs and entropy from hidden states cost, forward and backward? Ours against the naive form.

    python scripts/bench/logprob.py [--what entropy|loss] [--tokens 4096] [--vocab 32000] [--hidden 512] [--rounds 7]

Naive: logits of all tokens, a softmax over them (over the shards of all ranks), autograd. With --what loss:
cross-entropy from our log-probs with entropy, from those without, and at once. Prints at TP1 and TP2 the peak growth of
the largest rank's resident set beyond the inputs, gradients included, the median seconds of interleaved rounds with
their range, and ratios to the last arm's.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from resident import give_back, peak_growth
from rich.console import Console
from rich.table import Table
from torch import Tensor

TOLERANCE = 1e-4


class SumOverRanks(torch.autograd.Function):
    """All-reduce of partial sums. used_alike: every rank goes on to the same, so each has the whole gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, used_alike: bool) -> Tensor:
        ctx.used_alike = used_alike
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        if not ctx.used_alike:
            grad = grad.clone()
            dist.all_reduce(grad)
        return grad, None


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(log-prob, entropy) [T] from all logits [T, V / tp_size] at once."""
    logits = hidden @ weight.t()
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    log_sum = SumOverRanks.apply((logits - largest[:, None]).exp().sum(-1), False).log()
    log_probs = logits - (largest + log_sum)[:, None]
    local = targets - dist.get_rank() * len(weight)
    is_here = (local >= 0) & (local < len(weight))
    chosen = log_probs.gather(-1, local.clamp(0, len(weight) - 1)[:, None])[:, 0] * is_here
    return SumOverRanks.apply(chosen, True), -SumOverRanks.apply((log_probs.exp() * log_probs).sum(-1), True)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy as the engine computes them."""
    from megatron_rl.model.log_probs import VocabSoftmax, head_log_probs

    vocab_size = len(weight) * dist.get_world_size()
    return head_log_probs(hidden, weight, targets, VocabSoftmax(vocab_size, 1.0, dist.group.WORLD))


def mean_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor]:
    """Cross-entropy, with an entropy that nobody reads."""
    return (-chunked(hidden, weight, targets)[0].mean(),)


def mean_loss_alone(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor]:
    """The mean loss from log-probs alone."""
    from megatron_rl.model.log_probs import VocabSoftmax, head_log_probs_alone

    vocab_size = len(weight) * dist.get_world_size()
    return (-head_log_probs_alone(hidden, weight, targets, VocabSoftmax(vocab_size, 1.0, dist.group.WORLD)).mean(),)


def mean_loss_at_once(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor]:
    """The mean loss with gradients made where the loss is."""
    from megatron_rl.model.log_probs import VocabSoftmax, head_cross_entropy

    vocab_size = len(weight) * dist.get_world_size()
    return (
        head_cross_entropy(hidden, weight, targets, VocabSoftmax(vocab_size, 1.0, dist.group.WORLD)) / len(targets),
    )


ARMS: dict[str, dict[str, Callable]] = {
    "entropy": {"naive": naive, "ours": chunked},
    "loss": {"with entropy": mean_loss, "without": mean_loss_alone, "at once": mean_loss_at_once},
}
"""What is computed -> the ways to do it."""


class Case:
    """Inputs of one rank, and the gradients of one pass over them."""

    def __init__(self, num_tokens: int, vocab_size: int, hidden_size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.hidden = torch.randn(num_tokens, hidden_size, generator=generator).requires_grad_()
        weight = torch.randn(vocab_size, hidden_size, generator=generator) / hidden_size**0.5
        self.weight = weight.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
        self.targets = torch.randint(vocab_size, (num_tokens,), generator=generator)

    def run(self, arm: Callable) -> list[Tensor]:
        """Forward and backward; [what the arm gives, ..., gradient of hidden, gradient of weight]."""
        self.hidden.grad = self.weight.grad = None
        first, *further = arm(self.hidden, self.weight, self.targets)
        (first.mean() + 0.1 * sum(one.mean() for one in further)).backward()
        return [*(one.detach() for one in (first, *further)), self.hidden.grad, self.weight.grad]


def check_equal(case: Case, arms: dict[str, Callable]) -> None:
    """Raises AssertionError where the arms' numbers differ."""
    *others, expected = (case.run(arm) for arm in arms.values())
    for name, found in zip(arms, others, strict=False):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            error = float((one - other).abs().max() / other.abs().max())
            assert error < TOLERANCE, f"{name}: number {number} differs by {error:.2g}"


def measure(case: Case, arms: dict[str, Callable], rounds: int) -> dict[str, tuple[int, list[float]]]:
    """Arm -> (peak growth in bytes, seconds of every round), of the rank that has most of each."""
    peaks, seconds = dict.fromkeys(arms, 0), {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            case.hidden.grad = case.weight.grad = None
            give_back()
            dist.barrier()
            start = time.perf_counter()
            peak = peak_growth(lambda arm=arm: case.run(arm))
            most = torch.tensor([float(peak), time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            peaks[name] = max(peaks[name], int(most[0]))
            seconds[name].append(float(most[1]))
    return {name: (peaks[name], seconds[name]) for name in arms}


def rank_main(rank: int, tp_size: int, port: int, what: str, sizes: tuple[int, int, int], rounds: int, answers) -> None:
    torch.set_num_threads(max(1, os.cpu_count() // tp_size))
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, world_size=tp_size, rank=rank)
    case = Case(*sizes)
    check_equal(case, ARMS[what])
    measured = measure(case, ARMS[what], rounds)
    if rank == 0:
        answers.put(measured)
    dist.barrier()
    dist.destroy_process_group()


def main(
    what: Annotated[str, typer.Option(help=" | ".join(ARMS))] = "entropy",
    tokens: Annotated[int, typer.Option(help="Response tokens.")] = 4096,
    vocab: Annotated[int, typer.Option(help="Rows of the vocabulary, a multiple of 2.")] = 32000,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 512,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 7,
) -> None:
    """Measure at TP1 and TP2 and print one table."""
    title = {"entropy": "log-prob + entropy", "loss": "cross-entropy"}[what]
    table = Table(title=f"{title}, forward and backward: T={tokens}, V={vocab}, H={hidden}, float32")
    ratio = f"/ {list(ARMS[what])[-1]}"
    for column in ("", "arm", "peak growth MB", ratio, "median s", "range s", ratio):
        table.add_column(column, justify="right")
    for tp_size in (1, 2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        answers = mp.get_context("spawn").SimpleQueue()
        arguments = (tp_size, port, what, (tokens, vocab, hidden), rounds, answers)
        mp.spawn(rank_main, args=arguments, nprocs=tp_size)
        measured = answers.get()
        last = measured[list(ARMS[what])[-1]]
        peak, median = last[0], statistics.median(last[1])
        for name, (bytes_, seconds) in measured.items():
            middle = statistics.median(seconds)
            table.add_row(
                f"TP{tp_size}",
                name,
                f"{bytes_ / 1e6:.0f}",
                f"{bytes_ / peak:.1f}",
                f"{middle:.3f}",
                f"{min(seconds):.3f} to {max(seconds):.3f}",
                f"{middle / median:.2f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
