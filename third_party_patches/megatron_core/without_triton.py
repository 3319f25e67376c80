"""Let megatron-core be imported where Triton is not installed.

Reason: from 0.18 on `megatron.core.pipeline_parallel` and the experts import kernels in Triton for a way of keeping
activations ("paged stash") that this project does not use. Megatron-core does not require Triton, and torch's build for
CPUs does not bring it, so the import ends in "No module named 'triton'".
What it does: while those kernels are imported, Triton's modules exist and are empty, but for decorators that return
their functions. Afterwards they are gone, so that every question whether Triton is installed is answered by no. A
kernel that is called raises TypeError. Where Triton is installed, nothing changes.
It is applied by `import megatron_rl`, which comes before every import of megatron-core; `apply` again changes nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from third_party_patches.guard import MEGATRON, Patch

KERNELS = "megatron.core.transformer.moe.ops.paged_stash"
LANGUAGE = "triton.language"


def _decorated(function: object = None, **options: object) -> object:
    """A function, or the decorator that returns it."""
    return function if callable(function) else _decorated


@contextmanager
def empty_triton() -> Iterator[None]:
    """Put nearly empty modules in the place of Triton's."""
    triton, language = ModuleType("triton"), ModuleType(LANGUAGE)
    vars(triton).update(jit=_decorated, autotune=_decorated, heuristics=_decorated, language=language)
    vars(language).update(constexpr=int)
    sys.modules.update({"triton": triton, LANGUAGE: language})
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules[LANGUAGE]


class KernelsLoader(SourceFileLoader):
    """Imports a module of kernels next to empty modules of Triton."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        with empty_triton():
            super().exec_module(module)


class KernelsFinder(MetaPathFinder):
    """Finds the module of kernels, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where the module is, with a loader of ours if Triton is not installed."""
        if fullname != KERNELS or importlib.util.find_spec("triton") is not None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = KernelsLoader(spec.loader.name, spec.loader.path)
        return spec


def apply() -> None:
    """Add the finder; must run before megatron-core is imported. A second call changes nothing."""
    if not any(isinstance(finder, KernelsFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, KernelsFinder())


PATCH = Patch(
    MEGATRON,
    apply,
    drop_when="megatron-core imports Triton where it uses it, or requires it",
    not_needed="<0.18",
)
