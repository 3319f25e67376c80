"""vLLM's models beside a vision tower: not importable without the patch, and with it, with no torchvision to see."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

NAMES = ("qwen2_5_vl", "qwen3_vl", "gemma3_mm", "qwen3_5")
NEEDED = pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")


def faults() -> list[str | None]:
    """The name that vLLM misses when it imports each model; None where it misses nothing."""
    missing: list[str | None] = []
    for name in NAMES:
        try:
            importlib.import_module(f"vllm.model_executor.models.{name}")
            missing.append(None)
        except ModuleNotFoundError as error:
            missing.append(error.name)
    return missing


def without_and_with() -> tuple[list[str | None], list[str | None], int]:
    """What is missing without and with the patch, and what a function gives that needs no torchvision."""
    from third_party_patches.vllm import without_torchvision

    without = faults()
    without_torchvision.PATCH.apply()
    without_torchvision.PATCH.apply()
    assert sum(type(finder).__name__ == "ProcessorFinder" for finder in sys.meta_path) == 1
    with_patch = faults()

    from transformers.models.qwen2_vl import image_processing_qwen2_vl
    from transformers.utils.import_utils import is_torchvision_available, is_torchvision_v2_available

    assert importlib.util.find_spec("torchvision") is None
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
    assert not is_torchvision_available() and not is_torchvision_v2_available()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torchvision")
    with pytest.raises(AttributeError, match=r"functional\.resize: torchvision is not installed"):
        _ = image_processing_qwen2_vl.tvF.resize
    return without, with_patch, image_processing_qwen2_vl.smart_resize(100, 200, factor=28)


@NEEDED
def test_models_beside_a_vision_tower_can_be_imported() -> None:
    """Would not catch a model that calls torchvision while it is built, or one outside of `NAMES`."""
    [(without, with_patch, size)] = run_ranks(1, without_and_with, timeout=100)
    assert without == ["torchvision"] * len(NAMES) and with_patch == [None] * len(NAMES)
    assert size == (112, 196)
