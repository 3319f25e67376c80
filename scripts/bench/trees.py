"""Rows that branch, laid as a trie beside rows that share their prompts alone: interleaved rounds, in CPU seconds.

    python scripts/bench/trees.py [--rounds 5] [--max-tokens 4096]

Three tasks of sixteen answers each: a prompt, then four turns, before each of which the answer branches in two; prompts
and turns are short or long. Then as many rows that share nothing. A log-prob pass and an update of a Llama of 4 layers
of 256.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Annotated

import torch
import typer
from packing import computed, small_model, start_alone
from rich.console import Console
from rich.table import Table

from megatron_rl.experience.micro_batches import MicroBatch, MicroBatching
from megatron_rl.parallel.balance import SequenceWork
from megatron_rl.records import Batch, ragged

NUM_TASKS, DEPTH, BRANCHES = 3, 4, 2
WORK = SequenceWork(1500.0)


def drawn(rng: random.Random, short: int, long: int) -> list[int]:
    """Random tokens, of a length around either."""
    size = max(4, int(rng.gauss(short, short / 5) if rng.random() < 0.6 else rng.gauss(long, long / 6)))
    return [rng.randrange(1, 500) for _ in range(size)]


def branching() -> list[tuple[list[int], list[bool]]]:
    """Rows with their masks: the second half of every turn is sampled."""
    rng = random.Random(1)
    rows: list[tuple[list[int], list[bool]]] = []

    def grow(tokens: list[int], sampled: list[bool], depth: int) -> None:
        if depth == DEPTH:
            rows.append((tokens, sampled))
            return
        for _ in range(BRANCHES):
            turn = drawn(rng, 40, 200)
            half = len(turn) // 2
            grow([*tokens, *turn], [*sampled, *[False] * half, *[True] * (len(turn) - half)], depth + 1)

    for _ in range(NUM_TASKS):
        prompt = drawn(rng, 60, 500)
        grow(prompt, [False] * len(prompt), 0)
    return rows


def alone() -> list[tuple[list[int], list[bool]]]:
    """As many rows, of which no two begin alike."""
    rng, rows = random.Random(2), []
    for _ in range(NUM_TASKS * BRANCHES**DEPTH):
        tokens = drawn(rng, 150, 700)
        rows.append((tokens, [place >= len(tokens) // 2 for place in range(len(tokens))]))
    return rows


def measured(model, rows: list[tuple[list[int], list[bool]]], max_tokens: int, rounds: int) -> dict:
    """(pass, layout) -> CPU seconds of every round; and layout -> tokens that pass the model."""
    trainable, head = model
    batch = Batch(
        input_ids=ragged([torch.tensor(row) for row, _ in rows]), sampled=ragged([torch.tensor(m) for _, m in rows])
    )
    cuts = {
        name: MicroBatching(1, max_tokens, as_tree=as_tree, work=WORK)
        for name, as_tree in (("packed", False), ("tree", True))
    }
    pipeline = trainable.pipeline

    def loss(hidden: torch.Tensor, block: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs, entropy = (
            block.whole(part) for part in head.log_probs_and_entropy(block.scored(hidden), block.targets)
        )
        return -(log_probs + 0.01 * entropy).sum() / len(rows), {"sum": log_probs.detach().sum()}

    def scored(name: str) -> float:
        per_token = lambda hidden, block: block.whole(head.log_probs(block.scored(hidden), block.targets))  # noqa: E731
        return float(pipeline.forward(batch, cuts[name], per_token).sum())

    def updated(name: str) -> float:
        blocks = pipeline.micro_batches(batch, cuts[name])
        return float(pipeline.forward_backward(blocks, loss)["sum"])

    seconds: dict = {(kind, name): [] for kind in ("log-probs", "update") for name in cuts}
    for number in range(rounds + 1):
        sums = []
        for kind, run in (("log-probs", scored), ("update", updated)):
            for name in cuts:
                start = time.process_time()
                sums.append(run(name))
                if number:
                    seconds[kind, name].append(time.process_time() - start)
        assert max(sums) - min(sums) < 1e-4 * abs(sums[0]), sums
    num_tokens = {name: computed(pipeline.micro_batches(batch, cut)) for name, cut in cuts.items()}
    return {"seconds": seconds, "tokens": num_tokens, "read": sum(len(row) for row, _ in rows)}


def main(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 5,
    max_tokens: Annotated[int, typer.Option(help="Tokens, or nodes, of a pass.")] = 4096,
) -> None:
    """Print the table."""
    start_alone(num_threads=1)  # threads that wait for each other on a busy machine would count
    model = small_model()
    table = Table(title="CPU seconds, cutting included, medians with their range")
    for column in ("rows", "pass", "tokens read / packed / tree", "packed", "tree", "packed / tree"):
        table.add_column(column, justify="right")
    for name, rows in (("branching", branching()), ("alone", alone())):
        cost = measured(model, rows, max_tokens, rounds)
        tokens = f"{cost['read']} / {cost['tokens']['packed']} / {cost['tokens']['tree']}"
        for kind in ("log-probs", "update"):
            packed, tree = (cost["seconds"][kind, layout] for layout in ("packed", "tree"))
            ratios = [one / other for one, other in zip(packed, tree, strict=True)]
            shown = (
                f"{statistics.median(part):.2f} ({min(part):.2f} to {max(part):.2f})" for part in (packed, tree, ratios)
            )
            table.add_row(name, kind, tokens, *shown)
    Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
