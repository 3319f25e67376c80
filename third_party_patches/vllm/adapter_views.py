"""Let vLLM's LoRA layers read given tensors, with a given scale, and never write them.

Reason: vLLM copies adapters from files into buffers of its own and multiplies by 1.0 (files have the scale in B). The
trainer's adapters change in place at every update, and B is kept without the scale, so that Adam sees PEFT's B. A
warm-up run would write random adapters into whatever the buffers are.
What it does: for engines that are built inside `using_adapters(tensors, scale)`, LoRA layers get views of the tensors
as their buffers when they are made; adapters that vLLM loads are empty; the literal 1.0 becomes the scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from third_party_patches.guard import VLLM, Patch


class Given(NamedTuple):
    """tensors: `model.layers.0.self_attn.q_proj.lora_A` -> [slots, rank, in], and lora_B [slots, out, rank] alike."""

    tensors: Mapping[str, Any]
    scale: float


_given: ContextVar[Given | None] = ContextVar("adapters", default=None)


@contextmanager
def using_adapters(tensors: Mapping[str, Any], scale: float) -> Iterator[None]:
    """Build engines inside this block on the tensors; without any this does nothing."""
    token = _given.set(Given(tensors, scale) if tensors else None)
    try:
        yield
    finally:
        _given.reset(token)


def bind(worker_manager: Any, given: Given) -> None:
    """Put views of the tensors into vLLM's LoRA layers. Raises ValueError for tensors without a layer, or misshapen."""
    from vllm.lora.lora_model import LoRAModel

    manager, bound = worker_manager._adapter_manager, set[str]()
    for name, layer in manager.modules.items():
        parent, _, own = name.rpartition(".")
        projections = manager.packed_modules_mapping.get(own, [own])
        for attribute, kind in (("lora_a_stacked", "lora_A"), ("lora_b_stacked", "lora_B")):
            names = [f"{parent}.{projection}.{kind}" for projection in projections]
            buffers = zip(names, getattr(layer, attribute), strict=True)
            setattr(layer, attribute, tuple(_view(each, buffer, given.tensors) for each, buffer in buffers))
            bound |= {each for each in names if each in given.tensors}
        layer.set_lora = layer.reset_lora = _ignore
    if lost := sorted(given.tensors.keys() - bound):
        raise ValueError(f"vLLM has no LoRA layer for {lost}")
    for wrapper in manager.punica_wrapper_mapping.values():
        wrapper.add_lora_linear = _scaled(wrapper.add_lora_linear, given.scale)
    manager._create_merged_loras_inplace = _ignore  # an empty adapter has no first layer
    rank = manager.lora_config.max_lora_rank
    worker_manager._load_adapter = lambda request: LoRAModel(request.lora_int_id, rank, {})


def _view(name: str, buffer: Any, tensors: Mapping[str, Any]) -> Any:
    """The given tensor in the buffer's shape [slots, 1, rows, columns]; without one the buffer, whose zeros stay."""
    if name not in tensors:
        return buffer
    view = tensors[name][:, None]
    if view.shape != buffer.shape or view.dtype != buffer.dtype:
        wanted, given = ((list(tensor.shape), tensor.dtype) for tensor in (buffer, view))
        raise ValueError(f"{name}: vLLM expects {wanted}, given is {given}")
    return view


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Write nothing."""


def _scaled(add_lora_linear: Callable[..., Any], factor: float) -> Callable[..., Any]:
    @functools.wraps(add_lora_linear)
    def scaled(y: Any, x: Any, a: Any, b: Any, scale: float, *args: Any, **kwargs: Any) -> Any:
        return add_lora_linear(y, x, a, b, scale * factor, *args, **kwargs)

    return scaled


def apply() -> None:
    """Replace `LoRAModelRunnerMixin.load_lora_model`; must run before an engine is built."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    original = LoRAModelRunnerMixin.load_lora_model
    if original.__module__ == __name__:
        return

    def load_lora_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model, given = original(self, *args, **kwargs), _given.get()
        if given is not None:
            bind(self.lora_manager, given)
        return model

    load_lora_model.__module__ = __name__
    LoRAModelRunnerMixin.load_lora_model = load_lora_model


PATCH = Patch(VLLM, apply, drop_when="vLLM takes an adapter's tensors and scale from its caller, without a copy")
