"""All experts in two calls, forward and backward, against float64: uneven and empty groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import step_outcome
import torch
from models import both_ways, off_by


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Largest error of output and gradients, in two calls and one expert after the other; bfloat16. Seconds of both."""
    from megatron_rl.device import settled_seconds
    from megatron_rl.model.experts import fits_grouped_mm, grouped, one_by_one

    where = torch.device(device)
    hidden, columns = (64, 48) if small else (2048, 768)
    uneven = [0, 17, 1, 0, 250, 3, 0, 64] if small else [0, 1700, 1, 0, 6500, 333, 0, 640] * 4
    for name, counts in (("uneven", uneven), ("even", [sum(uneven) // len(uneven)] * len(uneven)), ("one", [0, 33, 0])):
        generator = torch.Generator(device).manual_seed(0)
        shapes = (
            (sum(counts), hidden),
            (sum(counts),),
            (len(counts), 2 * columns, hidden),
            (len(counts), hidden, columns),
        )
        given = [torch.randn(shape, generator=generator, device=device) * 0.1 for shape in shapes]
        grad = torch.randn(shapes[0], generator=generator, device=device)
        per_expert = torch.tensor(counts, device=device)
        assert fits_grouped_mm(given[0].bfloat16(), given[2].bfloat16(), given[3].bfloat16())
        exact = [x.bfloat16().double() for x in given]
        expected = both_ways(partial(with_counts, one_by_one, per_expert), exact, grad.double())
        for form in (grouped, one_by_one):
            rounded = [x.bfloat16() for x in given], grad.bfloat16()
            counted = partial(with_counts, form, per_expert)
            both_ways(counted, *rounded)  # loads kernels
            start = settled_seconds(where)
            found = both_ways(counted, *rounded)
            seconds = settled_seconds(where) - start
            errors = [off_by(a, b) for a, b in zip(found, expected, strict=True)]
            figures[f"{name}, {form.__name__}"] = f"off by {max(errors):.1e}, {seconds:.4f} s"
            assert max(errors) < 0.03, f"{name}, {form.__name__}: off by {errors}"
            idle = per_expert == 0
            assert not found[3][idle].any() and not found[4][idle].any(), "an expert without tokens has a gradient"


def with_counts(form: Any, counts: torch.Tensor, tokens: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """A form of the experts, whose second argument takes no gradient."""
    return form(tokens, counts, *rest)


if __name__ == "__main__":
    step_outcome.main(run)
