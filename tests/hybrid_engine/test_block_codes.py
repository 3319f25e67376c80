"""Codes and scales of 8-bit weights: bit for bit those of a loop over blocks, and numbers counted by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.hybrid_engine.block_codes import CODE, E4M3, MOST_ELEMENTS, dequantized, quantize
from megatron_rl.model.eight_bits import rounded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def codes_of(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(weight.shape, dtype=CODE)
    scales = torch.empty(weight.shape[0] // block, weight.shape[1] // block)
    quantize(weight, block, codes, scales)
    return codes.view(E4M3), scales


def loop_over_blocks(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: one block after the other, its scale found by trying powers of two."""
    codes = torch.empty(weight.shape, dtype=E4M3)
    scales = torch.empty(weight.shape[0] // block, weight.shape[1] // block)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
            most = float(weight[place].abs().max())
            exponent = -126
            while most > 448 * math.ldexp(1, exponent):
                exponent += 1
            scales[row, column] = math.ldexp(1, exponent)
            codes[place] = (weight[place].float() / math.ldexp(1, exponent)).to(E4M3)
    return codes, scales


def uneven(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values over many magnitudes, with a block of zeros and one whose largest value is 448 times a power of two."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns)
    drawn = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator)) * 0.02
    drawn[:16, :16] = 0
    drawn[16:32, :16] = drawn[16:32, :16].clamp(-0.4375, 0.4375)
    drawn[16, 0] = 0.4375
    return drawn.to(dtype)


def test_one_block_by_hand():
    """448 = 1.75 * 2^8 is e4m3's largest. The scale is 2^-9, as 0.875 / 448 = 2^-9; 3 bits of a fraction are kept."""
    codes, scales = codes_of(torch.tensor([[0.875, -0.4375], [0.1, 2.0**-18]]), 2)
    assert scales.tolist() == [[2.0**-9]]
    # 0.1 * 2^9 = 51.2 lies between 48 and 52; 2^-18 * 2^9 = 2^-9 is e4m3's smallest number.
    assert codes.float().tolist() == [[448.0, -224.0], [52.0, 2.0**-9]]
    assert codes.view(CODE).tolist() == [[0x7E, 0xF6], [0x65, 0x01]]
    assert dequantized(codes, scales, torch.float32).tolist() == [[0.875, -0.4375], [52 / 512, 2.0**-18]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32])
def test_codes_and_scales_are_those_of_a_loop(dtype, block):
    """Bit for bit, zeros and exact powers included. Would not catch a rule that the loop shares."""
    weight = uneven(96, 64, dtype)
    codes, scales = codes_of(weight, block)
    expected_codes, expected_scales = loop_over_blocks(weight, block)
    assert torch.equal(codes.view(CODE), expected_codes.view(CODE))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_is_what_training_in_8_bits_reads(dtype):
    """The emulated blockwise recipe. Would not catch a difference on a GPU, where transformer-engine rounds."""
    weight = uneven(256, 384, dtype)
    assert torch.equal(dequantized(*codes_of(weight, 128), dtype), rounded(weight, E4M3, (128, 128)))


def test_a_shard_has_the_codes_of_the_whole():
    """Cut by rows and by columns at blocks. Would not catch a cut that splits one: rules refuse it."""
    weight = uneven(128, 128, torch.bfloat16)
    codes, scales = codes_of(weight, 32)
    for rows, columns in ((slice(32, 96), slice(None)), (slice(None), slice(64, 128))):
        part, beside = codes_of(weight[rows, columns].contiguous(), 32)
        assert torch.equal(part.view(CODE), codes[rows, columns].view(CODE))
        whole = scales[rows.start and rows.start // 32 : rows.stop and rows.stop // 32]
        assert torch.equal(
            beside, whole[:, columns.start and columns.start // 32 : columns.stop and columns.stop // 32]
        )


def test_large_weights_are_quantized_in_strips(monkeypatch):
    """With the codes of one piece. Would not catch the memory that a strip takes."""
    weight = uneven(96, 64, torch.float32)
    codes, scales = codes_of(weight, 16)
    assert weight.numel() < MOST_ELEMENTS
    monkeypatch.setattr("megatron_rl.hybrid_engine.block_codes.MOST_ELEMENTS", 40 * 64)
    again, scales_again = codes_of(weight, 16)
    assert torch.equal(codes.view(CODE), again.view(CODE)) and torch.equal(scales, scales_again)


def test_quantizing_twice_changes_nothing():
    """A rounded weight is its own rounding. Would not catch codes that differ and mean the same."""
    once = dequantized(*codes_of(uneven(64, 64, torch.float32), 32), torch.float32)
    assert torch.equal(dequantized(*codes_of(once, 32), torch.float32), once)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_the_number_that_torch_reads(dtype):
    """All 254 numbers of e4m3, both zeros and the smallest included. Would not catch NaN: see the next test."""
    codes = torch.arange(256, dtype=CODE).view(16, 16)
    numbers = codes.view(E4M3).float()
    read = dequantized(codes.view(E4M3), torch.ones(1, 1), torch.float32)
    assert torch.equal(read[numbers == numbers], numbers[numbers == numbers])
    assert int((numbers != numbers).sum()) == 2
    small = dequantized(codes.view(E4M3), torch.full((1, 1), 2.0**-9), dtype).float()
    assert torch.equal(small[numbers == numbers], (numbers * 2.0**-9)[numbers == numbers].to(dtype).float())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_stay_so(bad):
    """A NaN has no code of its own in what is read, so that its block's scale must show it. Would not catch where."""
    weight = torch.ones(32, 32)
    weight[3, 4] = bad
    read = dequantized(*codes_of(weight, 16), torch.float32)
    assert not read[3, 4].isfinite() and read[16:, :].isfinite().all()
