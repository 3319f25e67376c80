"""Products of 8-bit factors against float64, and against what the project rounds where it emulates them."""

from __future__ import annotations

from typing import Any

import step_outcome
import torch
from models import added_up, off_by

BLOCK = 128


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Largest error of torch's product with one scale, and with one for each 1 x 128 and 128 x 128; its seconds."""
    from megatron_rl.model.eight_bits import E4M3, rounded

    tokens, inputs, outputs = (128, 256, 384) if small else (2048, 4096, 4096)
    generator = torch.Generator(device).manual_seed(0)
    states, weight = (torch.randn(rows, inputs, generator=generator, device=device) for rows in (tokens, outputs))
    cuts = {"one scale": (None, None), "blockwise": ((1, BLOCK), (BLOCK, BLOCK))}
    if device == "cpu":
        del cuts["blockwise"]
        figures["blockwise"] = "a CPU has no such product"
    for name, tiles in cuts.items():
        (left, left_scale), (right, right_scale) = (
            codes_of(x, tile) for x, tile in zip((states, weight), tiles, strict=True)
        )
        if name == "blockwise":  # the kernel reads the scales of one block of columns side by side
            left_scale = left_scale.t().contiguous().t()

        factors = left, right.t(), left_scale, right_scale.t()

        def product(factors: Any = factors) -> torch.Tensor:
            return torch._scaled_mm(*factors, out_dtype=torch.bfloat16)

        expected = rounded(states, E4M3, tiles[0]).double() @ rounded(weight, E4M3, tiles[1]).double().t()
        error = off_by(product(), expected)
        _, seconds = added_up(lambda total, product=product: total.add_(product()), (tokens, outputs), device, 8)
        figures[name] = f"off by {error:.1e}, {seconds:.5f} s"
        assert error < 0.02, f"{name}: off by {error}"


def codes_of(x: torch.Tensor, tile: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as e4m3 codes and float32 scales: one, or one of each tile, a power of two."""
    from megatron_rl.hybrid_engine.block_codes import LARGEST, power_of_two_scales
    from megatron_rl.model.eight_bits import E4M3

    if tile is None:
        scale = x.abs().amax() / LARGEST
        return (x / scale).to(E4M3), scale
    tiles = x.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0]))
    scales = power_of_two_scales(tiles.abs().amax((1, 3)))
    return (tiles / scales[:, None, :, None]).to(E4M3).flatten(2, 3).flatten(0, 1), scales


if __name__ == "__main__":
    step_outcome.main(run)
