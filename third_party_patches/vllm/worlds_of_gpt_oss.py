"""Let vLLM build gpt-oss in a world whose ranks do not divide the columns of its experts.

Reason: gpt-oss's layer of experts asserts that the number of all ranks divides `intermediate_size`, though only those
of its TP group share the columns. Training and generation are in one world here: 2880 columns and 128 ranks would fail.
What it does: the module of the model sees no world. It asks for one there alone.
"""

from __future__ import annotations

from types import SimpleNamespace

from third_party_patches.guard import VLLM, Patch


def apply() -> None:
    """Replace the name `dist` in vLLM's module of gpt-oss; must run before an engine builds its model."""
    from vllm.model_executor.models import gpt_oss

    gpt_oss.dist = SimpleNamespace(is_initialized=lambda: False)


PATCH = Patch(VLLM, apply, drop_when="vLLM's gpt-oss compares intermediate_size with its TP group alone")
