"""Rounds of entering and leaving with compiled and captured graphs, over weights that change under them."""

from __future__ import annotations

from typing import Any

import step_outcome
from rollouts import require_libraries, rounds


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """See `rounds`; and how many graphs vLLM captured."""
    if device == "cpu":
        raise step_outcome.NotRun("a CPU has no graphs to capture")
    require_libraries()
    from vllm.compilation.counter import compilation_counter

    rounds(device, small, "bfloat16", figures, eager=False)
    figures["graphs"] = compilation_counter.num_cudagraph_captured
    assert figures["graphs"], "vLLM captured no graph"


if __name__ == "__main__":
    step_outcome.main(run)
