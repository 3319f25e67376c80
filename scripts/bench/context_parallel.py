"""What does it cost to cut sequences over ranks that could each take sequences of their own? CP2 against DP2.

    python scripts/bench/context_parallel.py [--rows 32] [--rounds 7]

Two CPU processes with one thread each, forward and backward of one mini-batch through a small model, in interleaved
rounds: rows shared out over two data-parallel ranks; the same rows cut over two context-parallel ones in every way, and
cut only where they do not fit. A pass has 1024 tokens on a rank, but 2048 with DP2, where a rank must hold the
longest sequence. A step is as long as the slower rank's; the sum of log-probs must be the same in all arms.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from packing import draw, sequences
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from megatron_rl.config.megatron import MegatronConfig, OptimConfig, OverrideTransformerConfig
from megatron_rl.experience.micro_batches import MicroBatch, MicroBatching
from megatron_rl.losses.metrics import numbers_over_ranks
from megatron_rl.parallel.balance import SequenceWork, share_out

LONGEST = 2048
WORK = SequenceWork(1500.0)
LENGTHS = {"bimodal, a fifth": 0.2, "one length": 0.0}
"""Name -> the scale of the packing benchmark's bimodal lengths; 0: rows that are all as long."""
ARMS = {
    "DP2": (1, False, "p2p"),
    "CP2, p2p": (2, False, "p2p"),
    "CP2, all_gather": (2, False, "all_gather"),
    "CP2, a2a": (2, False, "a2a"),
    "up to CP2, p2p": (2, True, "p2p"),
}
"""Name -> CP, whether passes choose, the way to other ranks' keys."""


def lengths_of(name: str, num_rows: int) -> list[int]:
    """Tokens of every row."""
    scale = LENGTHS[name]
    return (
        [min(length, LONGEST) for length in draw("bimodal", num_rows, scale)] if scale else [LONGEST] * (num_rows // 4)
    )


def trainable_of(megatron: MegatronConfig) -> tuple[Any, Any]:
    """(TrainableModel, VocabHead) of a small Llama with fixed weights on this process's layout."""
    from megatron_rl.device import Device
    from megatron_rl.model.gpt import build_language_model, transformer_config
    from megatron_rl.model.log_probs import VocabSoftmax
    from megatron_rl.model.vocab_head import VocabHead
    from megatron_rl.parallel.mpu import initialize_mpu
    from megatron_rl.parallel.rank_grid import train_grid
    from megatron_rl.roles.training import TrainableModel

    groups = initialize_mpu(train_grid(dist.get_world_size(), megatron), seed=1)
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
    config = transformer_config(hf_config, groups, megatron, Device("cpu"))
    models = build_language_model(hf_config, config, groups, vocab_multiple=64)
    torch.manual_seed(1)
    for parameter in models[0].parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    trainable = TrainableModel(models, lambda: None, OptimConfig(), 1, megatron, groups, torch.device("cpu"))
    return trainable, VocabHead(trainable.models[-1], VocabSoftmax(hf_config.vocab_size, 1.0, groups.tp_group))


def one_step(arm: str, lengths: list[int]) -> tuple[float, float]:
    """(seconds of forward and backward on the slower rank, sum of log-probs)."""
    from megatron.core import parallel_state

    cp_size, chooses, way = ARMS[arm]
    megatron = MegatronConfig(
        context_parallel_size=cp_size,
        dynamic_context_parallel=chooses,
        override_transformer_config=OverrideTransformerConfig(cp_comm_type=way),
    )
    trainable, head = trainable_of(megatron)
    record, grid = sequences(lengths), trainable.groups.grid
    if grid.dp_size > 1:
        shares = share_out(WORK(lengths), [1] * len(lengths), [len(lengths) // 2, -(-len(lengths) // 2)])
        record = record[torch.tensor(shares[trainable.groups.dp_rank])]
    limit = LONGEST if cp_size == 1 or not chooses else LONGEST // 2
    cut = MicroBatching(1, max_tokens=limit, work=WORK)

    def loss(hidden: torch.Tensor, block: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_probs, _ = head.log_probs_and_entropy(block.scored(hidden), block.targets)
        if block.share is not None:
            log_probs = block.whole(log_probs)
        return -log_probs.sum() / len(lengths), {"sum": log_probs.detach().sum()}

    dist.barrier()
    start = time.perf_counter()
    blocks = trainable.pipeline.micro_batches(record, cut)
    [total] = numbers_over_ranks(trainable.pipeline.forward_backward(blocks, loss), trainable.groups.row_group).values()
    dist.barrier()
    seconds = time.perf_counter() - start
    parallel_state.destroy_model_parallel()
    return seconds, total


def rank(number: int, port: int, num_rows: int, rounds: int) -> None:
    """One process; the first prints."""
    from third_party_patches import apply_patches

    torch.set_num_threads(1)
    apply_patches("cpu")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=number)
    table = Table(title=f"Forward and backward on 2 ranks, {rounds} interleaved rounds")
    for column in ("lengths", "arm", "median s", "range s", "of DP2"):
        table.add_column(column, justify="right")
    for name in LENGTHS:
        lengths = lengths_of(name, num_rows)
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for round_ in range(rounds + 1):
            found = {arm: one_step(arm, lengths) for arm in ARMS}
            sums = [total for _, total in found.values()]
            assert max(sums) - min(sums) < 1e-4 * abs(sums[0]), sums
            if round_:  # the first warms up
                for arm, (taken, _) in found.items():
                    seconds[arm].append(taken)
        for arm, steps in seconds.items():
            ratios = [ours / theirs for ours, theirs in zip(steps, seconds["DP2"], strict=True)]
            spread = f"{min(steps):.2f} to {max(steps):.2f}"
            table.add_row(name, arm, f"{statistics.median(steps):.2f}", spread, f"{statistics.median(ratios):.2f}")
    if number == 0:
        Console(width=110).print(table)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the groups of all arms are still there, and gloo's threads would be waited for


def main(
    rows: Annotated[int, typer.Option(help="Samples of the mini-batch.")] = 32,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 7,
) -> None:
    """Print the table."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank, (port, rows, rounds), nprocs=2)


if __name__ == "__main__":
    typer.run(main)
