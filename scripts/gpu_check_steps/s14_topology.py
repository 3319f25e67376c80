"""What this machine is: versions, GPUs and their links, InfiniBand, as `megatron-rl check-cluster` asks a node."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import step_outcome


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """On a CPU versions alone."""
    from megatron_rl.node_check.node_facts import node_facts

    figures |= asdict(node_facts(on_gpus=device == "cuda"))
    assert device == "cpu" or figures["gpus"], "nvidia-smi lists no GPU"


if __name__ == "__main__":
    step_outcome.main(run)
