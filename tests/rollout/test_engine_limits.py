"""The installed vLLM's own limits beside the planner's, which does not import it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from megatron_rl.config.trainer import LARGEST_SEED
from megatron_rl.model.parts.grouped_attention import (
    BLOCK_SIZES,
    CPU_HEAD_SIZES,
    CUDA_HEAD_MULTIPLE,
    CUDA_LARGEST_HEAD,
)
from megatron_rl.planning.engine_rules import CPU_TP_SIZES

pytestmark = pytest.mark.timeout(120)

# The engine is imported where it is needed: whoever collects the tests does not need it.


@pytest.fixture
def on_cpu() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("kernels of vLLM's CPU build")


def attention_is_right(size: int) -> bool:
    """Whether vLLM's CPU kernels compute 5 causal tokens of 2 heads over 1 key/value head; False where none fits."""
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_tokens, block = 5, BLOCK_SIZES["cpu"]
    query, key, value = (torch.randn(num_tokens, heads, size) for heads in (2, 1, 1))
    keys, values = torch.zeros(2, 1, 2 * block, size).chunk(2, dim=2)
    starts, lengths = torch.tensor([0, num_tokens], dtype=torch.int32), torch.tensor([num_tokens], dtype=torch.int32)
    isa, answer = _get_attn_isa(torch.float32, block, size), torch.zeros(num_tokens, 2, size)
    table = torch.tensor([[1]], dtype=torch.int32)
    try:
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(num_tokens) + block, isa)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            1, 2, 1, size, lengths, torch.float32, starts, True, -1, isa, True
        )
        ops.cpu_attention_with_kv_cache(
            query, keys, values, answer, starts, lengths, size**-0.5, True, None, -1, table, 0.0, schedule, None
        )
    except RuntimeError as error:
        assert "Unsupported CPU attention configuration" in str(error)
        return False
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(answer, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
    return True


@pytest.mark.usefixtures("on_cpu")
def test_head_sizes_are_those_of_the_kernels():
    """Multiples of 4 up to 576: those of the list are computed, no other is. Would not catch bfloat16's kernels."""
    assert tuple(size for size in range(4, 577, 4) if attention_is_right(size)) == CPU_HEAD_SIZES


def test_head_sizes_of_cuda_are_flash_attentions():
    """Would not catch another backend that vLLM takes on some GPUs."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    allowed = [size for size in range(1, 300) if FlashAttentionBackend.supports_head_size(size)]
    assert [size for size in allowed if size <= CUDA_LARGEST_HEAD] == [
        *range(CUDA_HEAD_MULTIPLE, CUDA_LARGEST_HEAD + 1, CUDA_HEAD_MULTIPLE)
    ]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.dist
@pytest.mark.exhaustive
def test_tp_sizes_are_those_that_the_all_reduce_adds_up():
    """2 to 9 ranks. Would not catch a larger size that a later vLLM can do."""
    program = [sys.executable, str(Path(__file__).with_name("sum_over_ranks.py")), *map(str, range(2, 10))]
    finished = subprocess.run(program, capture_output=True, text=True, timeout=100, check=True)
    lines = [line for line in finished.stdout.splitlines() if line[:1].isdigit()]
    answers = {int(size): said for size, _, said in (line.partition(" ") for line in lines)}
    assert tuple(size for size, said in answers.items() if said == "right") == CPU_TP_SIZES[1:], answers
    assert len(answers) == 8 and "Invalid world size" in answers[6]


def test_seeds_are_numpys():
    """vLLM hands its seed to numpy, which takes 0 to 2^32 - 1. Would not catch a seed that is changed on the way."""
    from vllm.utils.torch_utils import set_random_seed

    before = numpy.random.get_state(), torch.get_rng_state()
    set_random_seed(LARGEST_SEED)
    for seed in (-1, LARGEST_SEED + 1):
        with pytest.raises(ValueError, match="between 0 and"):
            set_random_seed(seed)
    numpy.random.set_state(before[0])
    torch.set_rng_state(before[1])
