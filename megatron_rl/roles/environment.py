"""The environment of a worker process: variables set before it starts, and variables it reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from megatron_rl.errors import ConfigError
from megatron_rl.roles.nccl_variables import ERROR_HANDLING, nccl_variables

LOOPBACK_PREFIX = "127."
"""Start of IPv4 loopback addresses."""
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the allocator's settings. torch and vLLM read the first one before the second."""
LOGGING_LEVEL, GRAPH_REGISTER = "VLLM_LOGGING_LEVEL", "NCCL_GRAPH_REGISTER"
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
HANDED_ON = (
    *("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "CUDA_", "GLOO_"),
    # Ranks of one engine on two nodes must compile and round alike.
    *("VLLM_", "NVTE_", "PYTORCH_", "TRITON_", "FLASHINFER_"),
)
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class RankEnvironment:
    """One rank's place among processes and nodes, from the variables that the launcher sets.

    node_id: the launcher's name of this node. node_address: address of this node for other nodes; the loopback address
    if there are none. master_addr, master_port: address of rank 0. master_store: the file in which all ranks meet if
    they are on one machine. master_listen_fd: on rank 0, a socket that listens at that address already, if the launcher
    chose the port.

    replica, num_replicas, first_rank: for a replica, which is a world of its own, its number among the replicas of its
    pool and the number of the pool's ranks before it; otherwise 0, 1 and 0.
    """

    rank: int
    world_size: int
    local_rank: int
    node: int
    node_address: str
    master_addr: str
    master_port: int
    master_store: str | None = None
    master_listen_fd: int | None = None
    replica: int = 0
    num_replicas: int = 1
    first_rank: int = 0
    node_id: str = ""

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks of the run are on this machine."""
        return self.node_address.startswith(LOOPBACK_PREFIX)

    @classmethod
    def read(cls) -> RankEnvironment:
        variables = os.environ
        listener = variables.get("MASTER_LISTEN_FD")
        return cls(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables["LOCAL_RANK"]),
            node=int(variables["NODE_RANK"]),
            node_address=variables["NODE_ADDRESS"],
            master_addr=variables["MASTER_ADDR"],
            master_port=int(variables["MASTER_PORT"]),
            master_store=variables.get("MASTER_STORE"),
            master_listen_fd=None if listener is None else int(listener),
            replica=int(variables.get("POOL_REPLICA", "0")),
            num_replicas=int(variables.get("POOL_REPLICAS", "1")),
            first_rank=int(variables.get("POOL_FIRST_RANK", "0")),
            node_id=variables.get("NODE_ID", ""),
        )

    def choose_interfaces(self) -> None:
        """Let gloo and NCCL use the network that the node's address belongs to; before torch.distributed starts.

        Gloo alone would look the host's own name up, which many machines give a loopback address. An interface that
        the user has set stays. Raises ConfigError as `interface_of`.
        """
        if GLOO_INTERFACE not in os.environ:
            addresses = {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}
            os.environ[GLOO_INTERFACE] = interface_of(self.node_address, addresses)
        if not self.on_one_machine:
            os.environ.setdefault(NCCL_INTERFACE, f"={os.environ[GLOO_INTERFACE]}")  # "=": no other that begins alike


def choose_logging_level() -> None:
    """Let vLLM in this process log from the level on that `worker_environment` has given."""
    logging.getLogger("vllm").setLevel(os.environ.get(LOGGING_LEVEL, "ERROR"))


@contextmanager
def lost_peers_survived() -> Iterator[None]:
    """NCCL groups that are made meanwhile do not end the process when a peer is lost; who uses them must notice.

    torch reads the variable in the constructor of a group.
    """
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        os.environ.pop(ERROR_HANDLING)
        if before is not None:
            os.environ[ERROR_HANDLING] = before


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str:
    """The name of the network interface that has `address`; interfaces: name -> its addresses.

    Every loopback address belongs to the interface that has one. Raises ConfigError with those that there are when
    none has it.
    """
    for name, addresses in interfaces.items():
        own = [entry.partition("%")[0] for entry in addresses]  # IPv6 addresses may name their interface
        has_loopback = any(entry.startswith(LOOPBACK_PREFIX) for entry in own)
        if address in own or (address.startswith(LOOPBACK_PREFIX) and has_loopback):
            return name
    listing = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in interfaces.items())
    raise ConfigError(
        f"no network interface here has the node's address {address}, that Ray reports; its addresses are: {listing}; "
        "try: "
        f"start this node with `ray start --node-ip-address=` one of these, or set {GLOO_INTERFACE}"
    )


def handed_on() -> dict[str, str]:
    """Variables of this process that are passed to every rank on every node: those of NCCL, CUDA, gloo, torch's
    allocator, vLLM, transformer-engine, Triton and FlashInfer.

    Nodes of a Ray cluster have the variables of the shell that started them, not of the one that starts a run. Which
    GPUs a process sees is decided by Ray; `worker_environment` sets some variables itself.
    """
    own = {VISIBLE_GPUS, *worker_environment("cpu", 1), *worker_environment("cuda", 1)}
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(HANDED_ON) and name not in own}


def allocator_settings(sees_node: bool) -> str:
    """The settings of torch's allocator on CUDA: the user's, under either name, or the default.

    sees_node: see `worker_environment`. Raises ConfigError where both names are set differently, and for segments that
    grow where memory is shared, which CUDA cannot do.
    """
    given = {name: os.environ[name] for name in ALLOCATOR_NAMES if name in os.environ}
    if len(set(given.values())) > 1:
        first, second = (f"{name}={value}" for name, value in given.items())
        raise ConfigError(f"{first} and {second} are both set and differ; try: unset {ALLOCATOR_NAMES[1]}")
    settings = next(iter(given.values()), f"expandable_segments:{not sees_node}")
    if sees_node and "expandable_segments:true" in settings.lower():
        name = next(iter(given))
        raise ConfigError(
            f"{name}={settings} does not go with rollout.disable_custom_all_reduce=false, which shares memory between "
            "processes; try: expandable_segments:False"
        )
    return settings


MOST_THREADS_BESIDE_GPU = 4
"""Host threads of a rank whose work is on its GPU."""


def worker_environment(
    device_kind: str,
    ranks_per_node: int,
    *,
    sees_node: bool = False,
    updates_on_host: bool = False,
    survives_losses: bool = False,
) -> dict[str, str]:
    """Variables that must be set before a worker imports torch or vLLM. The user's own allocator settings, vLLM's level
    of logging, NCCL's registration of graphs and its record of calls are kept.

    sees_node: the worker shares memory with the GPUs of its node (`RolloutConfig.disable_custom_all_reduce`).
    updates_on_host: Adam runs on the CPU next to a GPU (`optimizer_cpu_offload`). survives_losses: as
    `nccl_variables`. Raises ConfigError as that and `allocator_settings`.
    """
    threads = max(1, (os.cpu_count() or 1) // ranks_per_node)
    if device_kind == "cuda" and not updates_on_host:
        threads = min(threads, MOST_THREADS_BESIDE_GPU)
    variables = {
        # The engine runs in this process; it must not fork a core of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        LOGGING_LEVEL: os.environ.get(LOGGING_LEVEL, "ERROR"),
        # What it configures when an engine starts empties the cache of every logger for each of its 350.
        "VLLM_CONFIGURE_LOGGING": "0",
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
        }
    else:
        variables |= {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            # Freed memory, of whatever sizes, becomes memory for others; vLLM's own pools turn it off for themselves.
            # CUDA cannot share such memory between processes, as vLLM's all-reduce does with what graphs read.
            **dict.fromkeys(ALLOCATOR_NAMES, allocator_settings(sees_node)),
            # NCCL would register the buffers of captured collectives, which do not stay where segments grow: Megatron
            # forbids it below compute capability 10.
            GRAPH_REGISTER: os.environ.get(GRAPH_REGISTER, "0"),
            # A collective that hangs leaves a record of the last ones of every rank.
            **nccl_variables(os.environ, survives_losses),
            # vLLM's choice depends on the model, and the two sample other samples from one seed.
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            # These reach for the other ranks' GPUs, too, and have not been tried in a process with a trainer.
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
            "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
            # Requests have seeds, which its sampler refuses; vLLM would still import it, and ask for nvcc.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
    return variables
