"""transformer-engine's own Python on a CPU: what it wants of its compiled parts and of a GPU is pretended.

Modules are built as on a GPU, with their parameters, names, shapes and marks; nothing can be computed with them.
"""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.metadata
import os
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

CUDNN = 91200
HOPPER = (9, 0)
STUBS = ("onnx", "onnxscript", "triton")
"""Packages that its Python imports at once and that building layers does not need."""


TE_NAME = re.compile(r"transformer.engine")
BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_max512_seqlen": 0, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
"""Names and numbers of transformer_engine_torch.NVTE_Fused_Attn_Backend."""
DTYPES = {
    "kByte": 0,
    "kInt16": 1,
    "kInt32": 2,
    "kInt64": 3,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat8E8M0": 9,
    "kFloat4E2M1": 10,
}
"""Names and numbers of transformer_engine_torch.DType."""


class StubFinder:
    """Finds packages of `STUBS`, whose attributes are mocks."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name.partition(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = mocked_module(spec.name)
        if spec.name == "triton":
            module.__version__ = "3.5.0"
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def mocked_module(name: str) -> ModuleType:
    """A module in which every public name is a mock."""
    module, mocks = types.ModuleType(name), dict[str, MagicMock]()

    def attribute(wanted: str) -> MagicMock:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return mocks.setdefault(wanted, MagicMock(name=f"{name}.{wanted}"))

    vars(module)["__getattr__"] = attribute
    return module


def numbers(file: Path, name: str, prefix: str, known: dict[str, int]) -> enum.EnumMeta:
    """The enumeration `name` of the compiled part. Newer versions compare it with names that `file` has: those."""
    listed = [prefix + one for one in re.findall(rf"^    (\w+) = int\((?:tex\.)?{name}\.", file.read_text(), re.M)]
    return enum.IntEnum(name, {one: known[one] for one in listed or known})


def compiled_part(root: Path) -> ModuleType:
    """What `transformer_engine_torch`, the compiled module, exports and Python looks at while it is imported."""
    module: Any = mocked_module("transformer_engine_torch")
    module.__spec__ = importlib.machinery.ModuleSpec("transformer_engine_torch", None)
    module.DType = numbers(root / "constants.py", "DType", "", DTYPES)
    module.NVTE_Fused_Attn_Backend = numbers(
        root / "cpp_extensions/fused_attn.py", "NVTE_Fused_Attn_Backend", "NVTE_", BACKENDS
    )
    module.get_cudnn_version = lambda: CUDNN
    return module


def asks_for_te(caller: types.FrameType) -> bool:
    return caller.f_globals["__name__"].startswith("transformer_engine")


def pretend(root: Path, version: str) -> None:
    """Let this process import the transformer-engine that was unpacked in `root`. Before megatron-core is imported."""
    import torch
    import torch._dynamo  # torch looks for the real triton, once
    import torch._higher_order_ops
    import torch._inductor.compile_fx
    import torch._inductor.lowering
    import torch._inductor.utils
    import torch.distributed.tensor
    import torch.onnx
    import torch.utils.flop_counter

    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch: compiled libraries are not loaded
    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, StubFinder())
    sys.modules["transformer_engine_torch"] = compiled_part(root / "transformer_engine/pytorch")
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        version if name.startswith("transformer") and "engine" in name else installed(name)
    )
    properties = SimpleNamespace(major=HOPPER[0], minor=HOPPER[1], name="H100", multi_processor_count=132)
    has_gpu = torch.cuda.is_available
    # There is one for transformer-engine alone: torch and Megatron would call it.
    torch.cuda.is_available = lambda: asks_for_te(sys._getframe(1)) or has_gpu()
    make = torch.tensor
    torch.tensor = lambda *data, device=None, **options: make(
        *data, device="cpu" if device == "cuda" and asks_for_te(sys._getframe(1)) else device, **options
    )
    torch.cuda.get_device_capability = lambda device=None: HOPPER
    torch.cuda.get_device_properties = lambda device=None: properties
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch
