"""How a step is run: `main(run)` in a process of its own, with its figures on the last line of the output."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "gpu-check: "
"""The beginning of the line with the figures."""

sys.path.insert(0, str(Path(__file__).parents[2]))


class NotRun(Exception):
    """The step has no form on this machine; the message says why."""


def main(run: Callable[[str, bool, dict[str, Any]], None]) -> None:
    """Call `run(device kind, small, figures)`, which fills the figures; say what they are and what went wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
    place |= {"NODE_ADDRESS": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= worker_variables(given.device) | place
    figures: dict[str, Any] = {}
    outcome, message = "passed", ""
    try:
        run(given.device, given.small, figures)
    except NotRun as reason:
        outcome, message = "not run", str(reason)
    except Exception:
        outcome, message = "failed", traceback.format_exc()
    print(MARK + json.dumps({"outcome": outcome, "message": message, "figures": figures}), flush=True)


def worker_variables(device: str) -> dict[str, str]:
    """Those of a worker, where psutil is there to import what knows them; else none but vLLM's."""
    try:
        from megatron_rl.roles.environment import worker_environment
    except ModuleNotFoundError:
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return worker_environment(device, ranks_per_node=1)
