"""How much host memory and reading does an import of a Hugging Face folder take? The actor's DDP model on gloo ranks.

    python scripts/bench/import_memory.py [--gigabytes 4] [--tp 2] [--pp 1] [--dtype bfloat16]

Makes a random Llama-like folder (removed at the end) and prints for each rank the bytes of its shard, the peak growth
of its resident set while it imports, less DDP's gradient buffer, and what of that is neither. Mapped file pages count.
Ranks of a node share pages, so that each byte of the folder, which no cache has at first, should come from the disk
once: the last line is the ratio.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.multiprocessing as mp
import typer
from omegaconf import OmegaConf
from resident import give_back, peak_growth
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from megatron_rl.checkpoint.hf_folder import file_names, plan_files, save_tensors, write_index
from megatron_rl.checkpoint.hf_tensors import hf_tensors
from megatron_rl.config.schema import RunConfig
from megatron_rl.model.families import family_of, param_map, shape_of
from megatron_rl.roles.environment import worker_environment

BOUND_BYTES = 300_000_000
"""What an import may take beyond its shard."""
FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class Growth:
    """Bytes of one rank: its shard, DDP's gradients (all there before the weights are read), the peak of all, and what
    the rank has read from the disk.
    """

    shard: int
    gradients: int
    peak: int
    seconds: float
    read: int = 0

    @property
    def beyond_shard(self) -> int:
        return self.peak - self.gradients - self.shard


def make_folder(folder: Path, num_bytes: int, dtype: str) -> None:
    """A random sharded Llama of about `num_bytes`, without a tokenizer, which importing does not read."""
    hidden, ffn, vocab = 2048, 5632, 32000
    itemsize = getattr(torch, dtype).itemsize
    layer = 4 * hidden * hidden + 3 * hidden * ffn
    num_layers = max(2, round((num_bytes / itemsize - 2 * vocab * hidden) / layer / 2) * 2)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=hidden,
        intermediate_size=ffn,
        vocab_size=vocab,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        dtype=dtype,
    )
    config.save_pretrained(folder)
    specs = param_map(family_of(config.architectures), shape_of(config.to_dict()))
    shapes = {tensor.name: tensor.shape for tensor in hf_tensors(specs)}
    sizes = {name: torch.Size(shape).numel() * itemsize for name, shape in shapes.items()}
    groups = plan_files(sizes, FILE_BYTES)
    # One random block over and over: drawing each number would take minutes.
    block = torch.randn(1 << 20).to(getattr(torch, dtype))
    files = dict(zip(file_names(len(groups)), groups, strict=True))
    for file, names in files.items():
        save_tensors({name: tiled(block, shapes[name]) for name in names}, folder / file)
    write_index(folder, files, sum(sizes.values()))


def forget(folder: Path) -> None:
    """Write files to the disk, and drop their pages."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_read() -> int:
    """The bytes that this process has had the disk read, as Linux counts them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def tiled(block: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return block.repeat(-(-numel // block.numel()))[:numel].reshape(shape)


def import_config(folder: str, tp_size: int, pp_size: int, dtype: str) -> RunConfig:
    """The configuration of a run that imports a folder; the files that it names are not read."""
    config = OmegaConf.structured(RunConfig)
    config.actor_rollout_ref.model.path = folder
    config.actor_rollout_ref.actor.megatron.merge_with(
        {"tensor_model_parallel_size": tp_size, "pipeline_model_parallel_size": pp_size, "dtype": dtype}
    )
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 1
    config.data.train_files = config.data.val_files = "unused"
    config.trainer.device = "cpu"
    return OmegaConf.to_object(config)


def measure_import(config: RunConfig, load_first: bool = False) -> Growth:
    """Import on this rank; all ranks must call. `load_first`: read the weights before DDP has a place for them."""
    from megatron_rl.checkpoint.model_folder import ModelFolder
    from megatron_rl.config.megatron import OverrideDDPConfig
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import ModelSource
    from megatron_rl.roles.training import in_flat_buffers

    worker = RankHost(config)
    shared = config.actor_rollout_ref
    source = ModelSource(ModelFolder(shared.model.path), worker.groups, worker.device, shared.actor.megatron)
    buffers, start = [], time.perf_counter()

    def build() -> None:
        model = source.language_model()
        if load_first:
            model.load()
        chunks = in_flat_buffers(model.chunks, OverrideDDPConfig())
        buffers.extend(buffer for chunk in chunks for buffer in chunk.buffers)
        if not load_first:
            model.load()

    give_back()
    before = bytes_read()
    peak = peak_growth(build)
    return Growth(
        shard=sum(buffer.param_data.nbytes for buffer in buffers),
        gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
        peak=peak,
        seconds=time.perf_counter() - start,
        read=bytes_read() - before,
    )


def rank_main(rank: int, variables: dict[str, str], config: RunConfig, answers) -> None:
    os.environ |= variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    answers.put((rank, measure_import(config)))


def print_table(growths: list[Growth]) -> None:
    table = Table(title=f"beyond the shard: at most {BOUND_BYTES / 1e6:.0f} MB")
    for column in ("rank", "shard MB", "gradients MB", "peak growth MB", "beyond shard MB", "read MB", "seconds"):
        table.add_column(column, justify="right")
    for rank, growth in enumerate(growths):
        sizes = (growth.shard, growth.gradients, growth.peak, growth.beyond_shard, growth.read)
        table.add_row(str(rank), *(f"{size / 1e6:.0f}" for size in sizes), f"{growth.seconds:.1f}")
    Console(width=110).print(table)


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the folder, 1e9 bytes.")] = 4.0,
    tp: Annotated[int, typer.Option(help="Tensor parallel size.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel size.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the folder and of training.")] = "bfloat16",
    where: Annotated[Path | None, typer.Option(help="Disk for the folder; the system's own if not given.")] = None,
) -> None:
    """Make the folder, import it on tp * pp processes, print; exits with 1 when a rank takes more than the bound."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = worker_environment("cpu", tp * pp)
    variables |= {"WORLD_SIZE": str(tp * pp), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"NODE_RANK": "0", "NODE_ADDRESS": "127.0.0.1"}
    with tempfile.TemporaryDirectory(dir=where) as folder:
        make_folder(Path(folder), int(gigabytes * 1e9), dtype)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        forget(Path(folder))
        answers = mp.get_context("spawn").SimpleQueue()
        mp.spawn(rank_main, args=(variables, import_config(folder, tp, pp, dtype), answers), nprocs=tp * pp)
    growths = dict(answers.get() for _ in range(tp * pp))
    print_table([growths[rank] for rank in sorted(growths)])
    print(f"read from the disk: {sum(growth.read for growth in growths.values()) / size:.2f} of the folder")
    if max(growth.beyond_shard for growth in growths.values()) > BOUND_BYTES:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
