"""Check that weights and KV cache are still where captured graphs read them.

The loader binds all weights, then vLLM captures its graphs while it starts. From then on memory may be released and
allocated again, but no tensor may move or be replaced, because a graph reads the old address. Addresses are noted when
the engine is built and compared before it generates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


class MovedTensorError(RuntimeError):
    """A tensor is not where captured graphs read it."""


def places(models: Sequence[torch.nn.Module], caches: Sequence[torch.Tensor]) -> dict[str, int]:
    """Name -> address of every parameter, under each of its names, of adapters, and of every tensor of the KV cache."""
    parameters = [pair for model in models for pair in model.named_parameters(remove_duplicate=False)]
    addresses = {f"parameter {name}": parameter.data_ptr() for name, parameter in parameters}
    addresses |= {name: tensor.data_ptr() for model in models for name, tensor in stacked(model)}
    return addresses | {f"KV cache tensor {number}": cache.data_ptr() for number, cache in enumerate(caches)}


def stacked(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what layers of LoRA read: they have their buffers in tuples, which are neither parameters nor buffers."""
    for module_name, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, tuple):
                tensors = [(number, each) for number, each in enumerate(value) if isinstance(each, torch.Tensor)]
                yield from ((f"tensor {number} of {module_name}.{name}", each) for number, each in tensors)


def must_stay(noted: dict[str, int], now: dict[str, int]) -> None:
    """Raises MovedTensorError with the tensors that have moved, appeared or disappeared since `noted`."""
    moved = [
        f"{name} ({shown(noted.get(name))} when the engine was built, {shown(now.get(name))} now)"
        for name in noted | now
        if noted.get(name) != now.get(name)
    ]
    if moved:
        more = f", and {len(moved) - 3} more" if len(moved) > 3 else ""
        raise MovedTensorError(
            "generation reads weights and KV cache at the addresses that they had when vLLM started, as its captured "
            "graphs do; moved "
            f"since: {'; '.join(moved[:3])}{more}. Whoever changes weights must write into the same tensors"
        )


def shown(place: int | None) -> str:
    """An address in hexadecimal; "none" for None."""
    return "none" if place is None else f"{place:#x}"
