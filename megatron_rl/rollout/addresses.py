"""Where captured graphs find weights and KV cache: noted when the engine has been built, compared before it generates.

The order is a contract: the loader binds all weights, vLLM captures its graphs while it starts, and from then on memory
may leave and come back, but no tensor moves and none is replaced. A graph would go on reading the old place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class MovedTensorError(RuntimeError):
    """A tensor is not where graphs would read it."""


def places(model: torch.nn.Module, caches: Sequence[torch.Tensor]) -> dict[str, int]:
    """Name -> address of every parameter, under each of its names, and of every tensor of the KV cache."""
    parameters = model.named_parameters(remove_duplicate=False)
    found = {f"parameter {name}": parameter.data_ptr() for name, parameter in parameters}
    return found | {f"KV cache tensor {number}": cache.data_ptr() for number, cache in enumerate(caches)}


def must_stay(noted: dict[str, int], now: dict[str, int]) -> None:
    """Raises MovedTensorError naming what has moved, come or gone since `noted`."""
    moved = [
        f"{name} ({shown(noted.get(name))} when the engine was built, {shown(now.get(name))} now)"
        for name in noted | now
        if noted.get(name) != now.get(name)
    ]
    if moved:
        more = f", and {len(moved) - 3} more" if len(moved) > 3 else ""
        raise MovedTensorError(
            f"generation reads weights and KV cache where they lay when vLLM started, as its captured graphs do; moved "
            f"since: {'; '.join(moved[:3])}{more}. Whoever changes weights must write into the same tensors"
        )


def shown(place: int | None) -> str:
    """As programs that look at memory write it."""
    return "none" if place is None else f"{place:#x}"
