"""Losses of tasks once more, on a plain loop of transformers: formulas written down apart from the package's.

Would not catch a formula misread in both places.
"""

from __future__ import annotations

import torch
from task_cases import PlainLoop, answer_batch, answers_of, token_batch
from torch.nn.functional import logsigmoid

BETA, BASELINE = 0.1, 0.3
WEIGHTS = (0.8, 1.5, 0.3)
"""Of three losses together."""


def cross_entropy(plain: PlainLoop) -> torch.Tensor:
    """Mean over the tokens that count."""
    batch = token_batch()
    rows = zip(batch["input_ids"].unbind(), batch["sampled"].unbind(), strict=True)
    summed = sum(plain.log_probs(ids, len(ids) - 1)[mask[1:]].sum() for ids, mask in rows)
    return -summed / batch.num_sampled.sum()


def ranking(plain: PlainLoop, sizes: tuple[int, ...]) -> torch.Tensor:
    """Of every two answers to a prompt, with margins, each prompt counted once."""
    batch, losses = answer_batch(sizes, score_token=True), []
    for scores, margins in zip(answer_scores(plain, sizes), batch["given"].unbind(), strict=True):
        pairs = [(i, j) for i in range(len(scores)) for j in range(i + 1, len(scores))]
        losses.append(-sum(logsigmoid(scores[i] - scores[j] - margins[i:j].sum()) for i, j in pairs) / len(pairs))
    return torch.stack(losses).mean()


def regression(plain: PlainLoop, sizes: tuple[int, ...]) -> torch.Tensor:
    """Mean squared distance of scores from labels."""
    return (
        (torch.cat(answer_scores(plain, sizes)) - answer_batch(sizes, score_token=True).flat("given")).square().mean()
    )


def preferences(plain: PlainLoop, sizes: tuple[int, ...], names: list[str]) -> torch.Tensor:
    """Weighted sum of means over prompts."""
    batch, total = answer_batch(sizes, score_token=False), torch.zeros(())
    for name, weight in zip(names, (1.0,) if len(names) == 1 else WEIGHTS, strict=True):
        numbers = answer_log_probs(plain, sizes, name in ("simpo", "orpo", "sft"))
        told = zip(numbers, batch["given"].unbind(), batch["labels"].unbind(), strict=True)
        total = total + weight * torch.stack([preference(name, *one) for one in told]).mean()
    return total


def answer_scores(plain: PlainLoop, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Of each prompt its answers' scores, without the token after the last."""
    rows = answers_of(answer_batch(sizes, score_token=True))
    return list(torch.cat([plain.model(ids[None, :-1]).logits[:, 0] for ids, _ in rows]).split(list(sizes)))


def answer_log_probs(plain: PlainLoop, sizes: tuple[int, ...], mean: bool) -> list[torch.Tensor]:
    found = [plain.log_probs(*row) for row in answers_of(answer_batch(sizes, score_token=False))]
    return list(torch.stack([one.mean() if mean else one.sum() for one in found]).split(list(sizes)))


def preference(loss: str, numbers: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of one prompt."""
    ratio = numbers - reference
    better, worse = BETA * ratio[0], BETA * ratio[-1]
    if loss == "kto":
        return 1 - torch.sigmoid((2 * labels[0] - 1) * BETA * (ratio[0] - BASELINE))
    if loss in ("dpo", "robust"):  # without label smoothing
        return -logsigmoid(better - worse)
    if loss == "hinge":
        return torch.clamp(1 - better + worse, min=0)
    if loss == "apo_zero":
        return 1 - torch.sigmoid(better) + torch.sigmoid(worse)
    if loss == "apo_down":
        return torch.sigmoid(better) + 1 - torch.sigmoid(better - worse)
    if loss == "sppo_hard":
        return (ratio[0] - 0.5 / BETA) ** 2 + (ratio[1] + 0.5 / BETA) ** 2
    if loss == "nca_pair":
        return -logsigmoid(better) - (logsigmoid(-better) + logsigmoid(-worse)) / 2
    if loss == "sft":
        return -numbers[0]
    if loss == "ipo":
        return (ratio[0] - ratio[1] - 1 / (2 * BETA)) ** 2
    if loss == "simpo":
        return -logsigmoid(BETA * (numbers[0] - numbers[1]) - 0.5)
    odds = numbers - torch.log1p(-numbers.exp())
    return -numbers[0] - BETA * logsigmoid(odds[0] - odds[1])
