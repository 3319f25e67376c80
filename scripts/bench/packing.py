"""What is computed that nobody needs, how many passes it takes, and how even they are? Packed against padded.

    python scripts/bench/packing.py [--rows 512] [--max-tokens 16384] [--dp 8] [--rounds 5]

First the plans, for lengths as they occur, of one mini-batch over data-parallel ranks: tokens computed over tokens
there are, packs over their lower bound (tokens / limit, or sequences of more than half the limit), the most work of a
pack and of a rank over the mean. Then forward and backward of a small model over the same rows, cut in three ways, in
interleaved rounds.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from megatron_rl.cluster.routing import chunk_sizes
from megatron_rl.experience.micro_batches import MicroBatch, MicroBatching, micro_batches
from megatron_rl.parallel.balance import SequenceWork, share_out
from megatron_rl.records import Batch, ragged, single_turn

LONGEST = 8192
WORK = SequenceWork(attention_parity=49152.0)
"""That of a 7B Llama."""
DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "lognormal": lambda rng: rng.lognormvariate(6.5, 0.8),
    "bimodal": lambda rng: rng.gauss(300, 60) if rng.random() < 0.7 else rng.gauss(5000, 800),
}


def draw(distribution: str, num_rows: int, scale: float = 1.0) -> list[int]:
    """Lengths of sequences, from 2 to LONGEST."""
    rng = random.Random(1)
    return [min(max(int(DISTRIBUTIONS[distribution](rng) * scale), 2), LONGEST) for _ in range(num_rows)]


def sequences(lengths: list[int]) -> Batch:
    """Random rows whose second half is the response."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 500, (length,), generator=generator) for length in lengths]
    return single_turn(ragged(rows), torch.tensor(lengths) // 2)


def unevenness(parts: list[list[int]], work: list[float]) -> float:
    """The most work of a part over the mean."""
    done = [sum(work[item] for item in part) for part in parts]
    return max(done) / (sum(done) / len(done))


def computed(blocks: list[MicroBatch]) -> int:
    """Tokens that pass the model."""
    return sum(block.input_ids.numel() for block in blocks)


def plan_row(distribution: str, num_rows: int, max_tokens: int, dp_size: int) -> list[str]:
    """One mini-batch shared out among ranks, packed and padded."""
    lengths = draw(distribution, num_rows)
    work, record = WORK(lengths), sequences(lengths)
    start = time.perf_counter()
    ranks = share_out(work, [1] * num_rows, chunk_sizes(num_rows, dp_size))
    dynamic = MicroBatching(1, max_tokens, work=WORK)
    plans = [dynamic.plan([lengths[row] for row in rows]) for rows in ranks]
    seconds = time.perf_counter() - start
    num_packs, bound, worst = 0, 0, 0.0
    useful, packed_tokens, padded_tokens = sum(lengths), 0, 0
    for rows, plan in zip(ranks, plans, strict=True):
        mine, mine_work = [lengths[row] for row in rows], [work[row] for row in rows]
        num_packs += len(plan)
        bound += max(-(-sum(mine) // max_tokens), sum(length > max_tokens // 2 for length in mine))
        worst = max(worst, unevenness(plan, mine_work))
        share = record[torch.tensor(rows)]
        packed_tokens += computed(micro_batches(share, plan, remove_padding=True))
        # As many rows at a time as the same limit allows when each may be as long as the longest.
        fixed = MicroBatching(max(1, max_tokens // max(lengths))).plan(mine)
        padded_tokens += computed(micro_batches(share, fixed, remove_padding=False))
    in_order = unevenness([list(range(rank, num_rows, dp_size)) for rank in range(dp_size)], work)
    return [
        distribution,
        f"{packed_tokens / useful:.3f}",
        f"{padded_tokens / useful:.2f}",
        f"{num_packs / bound:.3f}",
        f"{worst:.3f}",
        f"{unevenness(ranks, work):.4f}",
        f"{in_order:.2f}",
        f"{seconds * 1e3:.0f}",
    ]


def start_alone(num_threads: int | None = None) -> None:
    """Make this process the only rank of a world. num_threads: of torch; None: one for every core."""
    torch.set_num_threads(num_threads or os.cpu_count() or 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=1, rank=0)


def small_model():
    """(TrainableModel, VocabHead) of a small Llama with random weights, alone in its process."""
    from megatron_rl.config.megatron import MegatronConfig, OptimConfig
    from megatron_rl.device import Device
    from megatron_rl.model.gpt import build_language_model, transformer_config
    from megatron_rl.model.log_probs import VocabSoftmax
    from megatron_rl.model.vocab_head import VocabHead
    from megatron_rl.parallel.mpu import initialize_mpu
    from megatron_rl.parallel.rank_grid import TrainGrid
    from megatron_rl.roles.training import TrainableModel
    from third_party_patches import apply_patches

    apply_patches("cpu")
    groups = initialize_mpu(TrainGrid(1, tp_size=1, pp_size=1), seed=1)
    hf_config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=256,
        intermediate_size=704,
        vocab_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
    )
    config = transformer_config(hf_config, groups, MegatronConfig(), Device("cpu"))
    models = build_language_model(hf_config, config, groups, vocab_multiple=64)
    for parameter in models[0].parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optim = OptimConfig()
    trainable = TrainableModel(models, lambda: None, optim, 1, MegatronConfig(), groups, torch.device("cpu"))
    return trainable, VocabHead(trainable.models[-1], VocabSoftmax(hf_config.vocab_size, 1.0, groups.tp_group))


def timings(model, distribution: str, num_rows: int, rounds: int) -> dict[str, tuple[float, list[float]]]:
    """Cut -> (tokens computed / useful, seconds of forward and backward over `num_rows` rows in every round)."""
    trainable, head = model
    lengths = draw(distribution, num_rows, scale=0.1)
    record = sequences(lengths)
    cuts = {
        "padded, 8 rows": MicroBatching(8, remove_padding=False),
        "packed, 8 rows": MicroBatching(8),
        "dynamic, 2048 tokens": MicroBatching(1, max_tokens=2048, work=SequenceWork(1500.0)),
    }

    def loss(hidden: torch.Tensor, block: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs, _ = head.log_probs_and_entropy(block.scored(hidden), block.targets)
        return -log_probs.sum() / len(record), {"sum": log_probs.detach().sum()}

    blocks = {name: trainable.pipeline.micro_batches(record, cut) for name, cut in cuts.items()}
    shares = {name: computed(cut) / sum(lengths) for name, cut in blocks.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cuts}
    for round_ in range(rounds + 1):
        sums = {}
        for name in cuts:
            start = time.perf_counter()
            sums[name] = float(trainable.pipeline.forward_backward(blocks[name], loss)["sum"])
            if round_:
                seconds[name].append(time.perf_counter() - start)
        assert max(sums.values()) - min(sums.values()) < 1e-4 * abs(sums["padded, 8 rows"]), sums
    return {name: (shares[name], seconds[name]) for name in cuts}


def main(
    rows: Annotated[int, typer.Option(help="Samples of the planned mini-batch.")] = 512,
    max_tokens: Annotated[int, typer.Option(help="Tokens per pass.")] = 16384,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks of the plan.")] = 8,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of the timing.")] = 5,
) -> None:
    """Print both tables."""
    console = Console(width=130)
    plans = Table(title=f"{rows} samples of up to {LONGEST} tokens on {dp} ranks, {max_tokens} tokens a pass")
    for column in (
        "lengths",
        "computed / useful, packed",
        "padded",
        "packs / bound",
        "packs: max / mean work",
        "ranks: max / mean work",
        "dealt in turn",
        "plan ms",
    ):
        plans.add_column(column, justify="right")
    for distribution in DISTRIBUTIONS:
        plans.add_row(*plan_row(distribution, rows, max_tokens, dp))
    console.print(plans)

    start_alone()
    model = small_model()
    table = Table(title="forward and backward of 64 samples, 4 layers of 256, lengths / 10")
    for column in ("lengths", "cut", "computed / useful", "median s", "range s", "padded / this"):
        table.add_column(column, justify="right")
    for distribution in DISTRIBUTIONS:
        measured = timings(model, distribution, 64, rounds)
        padded = statistics.median(measured["padded, 8 rows"][1])
        for name, (share, seconds) in measured.items():
            middle = statistics.median(seconds)
            spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
            table.add_row(distribution, name, f"{share:.3f}", f"{middle:.3f}", spread, f"{padded / middle:.2f}")
    console.print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
