"""Tiny models on both sides: transformers' own, and the trainer's from the same weights."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

SIZES = {
    "vocab_size": 70,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
KINDS: dict[str, dict[str, Any]] = {"Llama": {}, "Qwen3": {"head_dim": 32}, "Qwen3Moe": {"head_dim": 32, **EXPERTS}}
BILLION = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 20,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
"""A Llama of about a billion parameters."""


def save(kind: str, **changes: Any) -> Path:
    """A random model of a kind, the same one every time, in a folder of its own."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind], **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    folder = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    model.save_pretrained(folder)
    return folder


def join_world(kind: str) -> Any:
    """A world of one rank with Megatron's groups; the groups. Megatron's patches are applied first.

    A patch whose range leaves the installed version out is applied all the same: that is what is to be found out.
    """
    from megatron_rl.device import Device
    from megatron_rl.parallel.mpu import initialize_mpu
    from megatron_rl.parallel.rank_grid import TrainGrid
    from third_party_patches import patches_for
    from third_party_patches.guard import MEGATRON, is_needed

    device = Device(kind, int(os.environ["LOCAL_RANK"]))
    device.activate()
    for patch in patches_for(kind):
        if patch.library is MEGATRON and is_needed(patch):
            patch.apply()
    dist.init_process_group(
        device.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=120)
    )
    return initialize_mpu(TrainGrid(1, tp_size=1, pp_size=1, ep_size=1, etp_size=None), seed=1)


def trainer_model(folder: Path, dtype: str, kind: str, groups: Any) -> Any:
    """The trainer's model with the folder's weights, on the device."""
    from megatron_rl.checkpoint.model_folder import ModelFolder
    from megatron_rl.config.megatron import MegatronConfig
    from megatron_rl.device import Device
    from megatron_rl.roles.model_source import ModelSource

    source = ModelSource(ModelFolder(folder), groups, Device(kind), MegatronConfig(dtype=dtype))
    unloaded = source.language_model()
    with torch.no_grad():
        unloaded.load()
    return unloaded.chunks[0]


def hidden_states(model: Any, rows: torch.Tensor, lengths: list[int] | None = None) -> torch.Tensor:
    """Hidden states of rows [B, S] int64. lengths: of the segments of a packed row."""
    from megatron_rl.model.segments import Segments

    positions = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    segments = None if lengths is None else Segments.of(lengths, rows.device)
    hidden: torch.Tensor = model(rows, positions, None, packed_seq_params=segments)
    return hidden


def random_rows(lengths: list[int], device: str, vocab_size: int = 70) -> list[torch.Tensor]:
    """One row of tokens of each length."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, vocab_size, (length,), generator=generator).to(device) for length in lengths]


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """[B, longest], filled up on the right."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def off_by(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest expected element."""
    expected = expected.double()
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def added_up(
    add: Callable[[torch.Tensor], object], shape: tuple[int, int], device: str, repeats: int
) -> tuple[torch.Tensor, float]:
    """A float32 buffer of zeros to which `add` has been applied so many times, and the seconds of one of them."""
    from megatron_rl.device import settled_seconds

    total, where = torch.zeros(shape, device=device), torch.device(device)
    add(total)  # loads kernels
    total.zero_()
    start = settled_seconds(where)
    for _ in range(repeats):
        add(total)
    return total, (settled_seconds(where) - start) / repeats


def both_ways(
    form: Callable[..., torch.Tensor], given: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """The output of a form for these inputs, and the gradient of each of them."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = form(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
