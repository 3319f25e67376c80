"""The environment of a worker process: what is set before it starts, and what it reads."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class RankEnvironment:
    """One rank's place among the processes, from the variables that every launcher sets."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def read(cls) -> RankEnvironment:
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))


def worker_environment(device_kind: str, ranks_per_node: int) -> dict[str, str]:
    """Variables that must be set before a worker imports torch or vLLM."""
    threads = max(1, os.cpu_count() // ranks_per_node) if device_kind == "cpu" else 1
    variables = {
        # The engine lives in this process; it must not fork a core of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # Objects in checkpoints are pickles, and Megatron would load them without asking what they import.
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    if device_kind == "cpu":
        variables |= {
            # Several ranks share the cores, so none may pin itself to some of them.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # vLLM compiles one tiny function on CPU, which costs 10 s at the first call and gains nothing.
            "TORCHDYNAMO_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    else:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return variables
