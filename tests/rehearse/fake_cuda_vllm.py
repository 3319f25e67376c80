"""vLLM's GPU code in a process whose GPU is pretended: parts that its CPU wheel lacks answer without computing.

Compiled operators and Triton kernels write nothing: their results are unknown afterwards. Attention and experts
are custom operators in Python, with the fake forms that vLLM itself gives them.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import cuda_operators
import fake_graphs
import torch
from torch._ops import _OpNamespace
from torch._subclasses.fake_tensor import FakeTensor

from megatron_rl.rehearse.dispatch_mode import _written
from third_party_patches.torch import fake_cuda

COMPILED = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)
"""Modules of vLLM's GPU wheel; importing them registers operators."""
NAMESPACES = ("_C", "_moe_C", "_C_cache_ops", "_vllm_fa2_C", "_vllm_fa3_C")
CAN_DO = ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported")
DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "float8e4nv")
"""Names of `triton.language` that modules read when they are imported, or before a launch."""
ONE_TOKEN_EACH = "_get_num_sampled_and_rejected_kernel"
"""Writes how many tokens each request has drawn, which the host reads: 1, and none of them rejected."""


class EngineMode(fake_graphs.CapturingMode):
    """A rehearsal's mode for code under `inference_mode`, where torch hands over operators that are made of others.

    called: compiled operators, vLLM's operators in Python and Triton kernels -> how often.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.called = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in NAMESPACES:
            return self.launch(func, args, kwargs or {})
        if func.namespace == "vllm":
            self.called[func._schema.name] += 1
        if func.namespace == "aten" and func._can_decompose() and torch.is_inference_mode_enabled():
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def launch(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Launch a compiled operator, which computes nothing: its results are unknown."""
        self.called[func._schema.name] += 1
        for tensor in _written(func, args, options):
            self.values.put(tensor, None)

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note a call that computes nothing: it may have written each of its tensors."""
        self.called[name] += 1
        for value in (*args, *options.values()):
            if isinstance(value, FakeTensor):
                self.values.put(value, None)

    def seen_by_both(self, on_host: torch.Tensor) -> torch.Tensor:
        """A tensor on the device that reads the host's memory (unified addresses)."""
        with self.fake:
            there = torch.empty_strided(on_host.shape, on_host.stride(), dtype=on_host.dtype, device=self.device)
        self.values.give(there, on_host)
        return there


class Kernel:
    """A Triton kernel that is launched and does nothing."""

    def __init__(self, function: Any, mode: EngineMode) -> None:
        self.fn, self.mode = function, mode
        self.__name__, self.__module__ = function.__name__, function.__module__
        self.arg_names = list(inspect.signature(function).parameters)

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, **options: Any) -> None:
        self.mode.call(self.__name__, args, options)
        if self.__name__ == ONE_TOKEN_EACH:
            for tensor, value in zip(args, (1, 0), strict=False):
                self.mode.values.put(tensor, torch.full(tensor.shape, value, dtype=tensor.dtype))


class TunedConfig:
    """A configuration among which Triton would choose."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **options: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


class AnyNames(ModuleType):
    """A module of functions that only kernels call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: None


def pretend(mode: EngineMode) -> None:
    """Let this process import and run vLLM's GPU code. After `fake_cuda.apply`, before anything else of vLLM."""
    torch.version.cuda = "13.0"
    _answer_for_the_accelerator()
    torch.utils.swap_tensors = swap
    fake_graphs.apply(mode)
    _make_on_device_by_copy()
    for name in COMPILED:
        sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    cuda_operators.define()
    _answer_for_operators(mode)
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatform

    vllm.platforms._current_platform = CudaPlatform()
    _pretend_triton(mode)


def swap(first: Any, second: Any) -> None:
    """Let two tensors change places, though torch's fake mode holds weak references to both."""
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)


def _answer_for_operators(mode: EngineMode) -> None:
    found = _OpNamespace.__getattr__

    def attribute(namespace: Any, name: str) -> Any:
        try:
            return found(namespace, name)
        except AttributeError:
            # While it is imported vLLM asks which there are, to register fake forms of them.
            is_imported = sys._getframe(1).f_code.co_name == "<module>"
            if name.startswith("__") or is_imported or namespace.name not in NAMESPACES:
                raise
        if name in CAN_DO:
            return lambda *args: True
        if name == "weak_ref_tensor":
            return mode.weakly
        if name == "get_cuda_view_from_cpu_tensor":
            return mode.seen_by_both
        return lambda *args, **options: mode.call(f"{namespace.name}::{name}", args, options)

    _OpNamespace.__getattr__ = attribute


def _pretend_triton(mode: EngineMode) -> None:
    """Fill in vLLM's own placeholder of Triton."""
    import vllm.triton_utils
    import vllm.triton_utils.importing

    def jit(function: Any = None, **options: Any) -> Any:
        return Kernel(function, mode) if function is not None else lambda given: Kernel(given, mode)

    triton, language = vllm.triton_utils.triton, vllm.triton_utils.tl
    vllm.triton_utils.HAS_TRITON = vllm.triton_utils.importing.HAS_TRITON = True
    triton.jit, triton.Config = jit, TunedConfig
    triton.autotune = triton.heuristics = lambda *args, **options: lambda function: function
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    kinds = {name: type(name, (), {}) for name in ("Autotuner", "Heuristics", "JITFunction")}
    triton.runtime = SimpleNamespace(autotuner=SimpleNamespace(**kinds), jit=SimpleNamespace(**kinds))
    for kind in DTYPES:
        setattr(language, kind, kind)
    triton.__spec__, triton.__path__ = importlib.machinery.ModuleSpec("triton", None), []
    language.__path__ = []
    sys.modules |= {"triton": triton, "triton.language": language}
    for name in ("math", "extra", "extra.libdevice", "core"):
        sys.modules[f"triton.language.{name}"] = AnyNames(f"triton.language.{name}")


def _answer_for_the_accelerator() -> None:
    """What `fake_cuda` does for `torch.cuda`, for `torch.accelerator`."""
    gpu = fake_cuda.GPU

    def stats(device: Any = None) -> Any:
        known = {"allocated_bytes.all.peak": gpu.peak, "allocated_bytes.all.current": gpu.allocated}
        return Counter(known | {"reserved_bytes.all.current": gpu.allocated})

    answers = {
        "empty_cache": lambda: None,
        "memory_stats": stats,
        "memory_allocated": torch.cuda.memory_allocated,
        "max_memory_allocated": torch.cuda.max_memory_allocated,
        "memory_reserved": torch.cuda.memory_reserved,
        "max_memory_reserved": torch.cuda.max_memory_reserved,
        "reset_peak_memory_stats": torch.cuda.reset_peak_memory_stats,
        "get_memory_info": torch.cuda.mem_get_info,
        "synchronize": torch.cuda.synchronize,
        "current_stream": torch.cuda.current_stream,
        "set_stream": torch.cuda.set_stream,
    }
    for module in (torch.accelerator, torch.accelerator.memory):
        vars(module).update({name: own(answer) for name, answer in answers.items() if hasattr(module, name)})
    torch.cuda.memory.get_allocator_backend = lambda: "native"
    torch._C._accelerator_getAllocatorSettings = lambda: "expandable_segments:True"
    torch._C._accelerator_setAllocatorSettings = lambda settings: None


def own(answer: Any) -> Any:
    """A function of its own with the same answer: Dynamo has a handler for each."""
    return lambda *args, **options: answer(*args, **options)


def _make_on_device_by_copy() -> None:
    """Under `inference_mode` `torch.tensor` of a device is made there at once, and there is nothing to pin for."""
    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:
        made = make(data, **options)
        made = made.pin_memory() if pin_memory else made
        if device is None or torch.device(device).type == "cpu":
            return made
        return made.to(device)

    torch.tensor = tensor
