"""Run megatron-core on CPU tensors.

Reason: megatron-core names CUDA in about a hundred places: `device="cuda"`, `torch.cuda.current_device()`,
streams and events, and optimizers that compare `Tensor.type()` with "torch.cuda.FloatTensor".
What it does: the modules of megatron-core see, under the name `torch`, a proxy whose factory functions put tensors on
the CPU and whose `torch.cuda` is a small stand-in. Nobody else's `torch` changes. The three methods that a proxy of
a module cannot reach (`Tensor.cuda`, `Tensor.type`, `Module.cuda`) are wrapped and look at who calls.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

import torch

from third_party_patches.guard import MEGATRON, Patch
from third_party_patches.megatron_core.without_triton import KERNELS

FACTORIES = (
    "zeros ones empty full tensor as_tensor arange linspace rand randn "
    "zeros_like ones_like empty_like full_like rand_like randn_like"
).split()

LIBRARY = "megatron.core"


class NullStream:
    """A stream without effect: work on a CPU is done when the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> NullEvent:
        return NullEvent()

    def synchronize(self) -> None:
        pass


class NullEvent:
    """An event that has always occurred."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class ModuleProxy(types.ModuleType):
    """A module that answers with `overrides` first and with the real module otherwise."""

    def __init__(self, real: types.ModuleType, overrides: dict[str, object]) -> None:
        super().__init__(real.__name__)
        self.__dict__["_real"] = real
        self.__dict__.update(overrides)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_real"], name)


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory: a CUDA device becomes the CPU, pinned memory ordinary memory."""

    @functools.wraps(factory)
    def make(*args: object, **kwargs: object) -> torch.Tensor:
        if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        made: torch.Tensor = factory(*args, **kwargs)
        return made

    return make


def cpu_cuda_module() -> ModuleProxy:
    """A stand-in for `torch.cuda` whose current device is the CPU."""
    stream = NullStream()
    return ModuleProxy(
        torch.cuda,
        {
            "current_device": lambda: torch.device("cpu"),
            "synchronize": lambda *args, **kwargs: None,
            "empty_cache": lambda: None,
            "set_device": lambda device: None,
            "Stream": NullStream,
            "Event": NullEvent,
            "current_stream": lambda *args: stream,
            "default_stream": lambda *args: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "manual_seed": torch.manual_seed,
            "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
            "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
            "nvtx": ModuleProxy(torch.cuda.nvtx, {"range_push": lambda name: None, "range_pop": lambda: None}),
        },
    )


def called_from_megatron() -> bool:
    """Whether the caller of the wrapped method (two frames up) is a module of megatron-core."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.core")


def wrap_methods() -> None:
    """Let megatron-core, and only it, see CPU tensors as CUDA ones in `.cuda()` and `.type()`."""
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor_cuda, tensor_type, module_cuda = tensor.cuda, tensor.type, module.cuda

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if called_from_megatron() else tensor_cuda(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        if args or kwargs or not called_from_megatron():
            return answer
        return answer.replace("torch.", "torch.cuda.", 1)

    def cuda_of_module(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return self if called_from_megatron() else module_cuda(self, *args, **kwargs)

    tensor.cuda, tensor.type, module.cuda = cuda, type_, cuda_of_module


class ProxyLoader(SourceFileLoader):
    """Imports a module of megatron-core and gives it the proxy."""

    def __init__(self, name: str, path: str, proxy: ModuleProxy) -> None:
        super().__init__(name, path)
        self._proxy = proxy

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module's code."""
        super().exec_module(module)
        give(self._proxy, module)


class ProxyFinder(MetaPathFinder):
    """Finds modules of megatron-core, some of which are imported by functions, long after `apply`."""

    def __init__(self, proxy: ModuleProxy) -> None:
        self._proxy = proxy

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where the module is, with a loader of ours; kernels have one already."""
        if not fullname.startswith(LIBRARY) or fullname == KERNELS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = ProxyLoader(spec.loader.name, spec.loader.path, self._proxy)
        return spec


def give(proxy: ModuleProxy, module: types.ModuleType) -> None:
    """Let a module see the proxy under the name `torch`, if it sees torch there."""
    if vars(module).get("torch") is torch:
        vars(module)["torch"] = proxy


def apply() -> None:
    """Give modules of megatron-core the proxy, loaded ones and those to come; a second call changes nothing."""
    if any(isinstance(finder, ProxyFinder) for finder in sys.meta_path):
        return
    overrides: dict[str, object] = {name: on_cpu(getattr(torch, name)) for name in FACTORIES}
    overrides["cuda"] = cpu_cuda_module()
    proxy = ModuleProxy(torch, overrides)
    sys.meta_path.insert(0, ProxyFinder(proxy))
    for module in [module for name, module in list(sys.modules.items()) if name.startswith(LIBRARY)]:
        give(proxy, module)
    wrap_methods()


PATCH = Patch(MEGATRON, apply, drop_when="megatron-core takes the device from its configuration instead of naming CUDA")
