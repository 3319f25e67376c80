"""Where vLLM looks for kernels that it replaces: in all modules without the patch, in its own with it."""

from __future__ import annotations

import sys
import types

import pytest
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

NAMES = ("vllm.made_up", "vllm.other", "elsewhere")


def replaced() -> list[str]:
    """Which of three modules that name a kernel have its replacement."""
    from vllm.triton_utils import dispatcher

    def kernel(size: int) -> int:
        return size

    for name in NAMES:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].kernel = kernel
    dispatcher.register_kernels({"vllm.made_up.kernel": lambda size: 2 * size})
    assert sys.modules["vllm.other"].kernel[(1,)](size=3) == 6
    return [name for name in NAMES if isinstance(sys.modules[name].kernel, dispatcher.KernelOverride)]


def without_and_with() -> tuple[list[str], list[str]]:
    from third_party_patches.vllm import kernel_scan

    without = replaced()
    kernel_scan.PATCH.apply()
    return without, replaced()


def test_only_vllm_is_looked_through() -> None:
    """Would not catch a kernel that a module of somebody else names."""
    assert run_ranks(1, without_and_with, timeout=100) == [(list(NAMES), list(NAMES[:2]))]
