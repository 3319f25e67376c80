"""Read a rank's part of the adapters in a PEFT folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F

from megatron_rl.checkpoint.adapter_files import WEIGHTS, AdapterFiles, head_spec, is_adapter
from megatron_rl.checkpoint.fused_adapters import Source
from megatron_rl.checkpoint.hf_import import HFFolder
from megatron_rl.checkpoint.hf_tensors import hf_tensors, pieces
from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.sharding import Place


@torch.no_grad()
def load_adapters(
    parameters: Mapping[str, torch.Tensor], specs: Mapping[str, ParamSpec], folder: AdapterFiles, place: Place
) -> None:
    """Fill this rank's adapters (global names) from a PEFT folder, with zeros beyond the folder's rank, and the heads
    that it has.

    specs: of all adapters, and of heads that are trained next to them. Raises ConfigError as `AdapterFiles.sources`,
    and for an element that is NaN, infinite or beyond the range of the parameter's dtype.
    """
    named = {name: spec if is_adapter(name) else head_spec(spec) for name, spec in specs.items()}
    sources, read = folder.sources(named), _reader(folder)
    for tensor in hf_tensors({name: named[name] for name in parameters}):
        if tensor.name not in sources:
            continue  # a head that the folder does not have
        source, parameter = sources[tensor.name], parameters[tensor.parameter]
        for piece in pieces(tensor, (0,), {0: place}):  # none for the experts of other ranks
            part = source.cut(read(source, parameter.dtype))
            rows, columns = (size - given for size, given in zip(tensor.shape, part.shape, strict=True))
            whole = F.pad(part, (0, columns, 0, rows))
            parameter[piece.source].copy_(whole[piece.target])


def _reader(folder: AdapterFiles) -> Callable[[Source, torch.dtype], torch.Tensor]:
    """Return what reads a whole tensor of the folder; it keeps the last ones, for what is read part by part."""
    file = HFFolder(folder.path, dict.fromkeys(folder.names, WEIGHTS))

    @lru_cache(maxsize=2)
    def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        file.copy_box(name, tuple((0, size) for size in shape), shape, tensor)
        return tensor

    return lambda source, dtype: whole(source.name, source.shape, dtype)
