"""Which network interface a rank uses, from the address of its node."""

from __future__ import annotations

import os

import psutil
import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.roles.environment import HANDED_ON, RankEnvironment, handed_on, interface_of

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.3", "fe80::1%eth0"],
    "ib0": ["192.168.1.3"],
    "docker0": ["172.17.0.1"],
}


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("127.0.0.1", "lo"),
        ("127.0.0.9", "lo"),
        ("::1", "lo"),
        ("10.0.0.3", "eth0"),
        ("fe80::1", "eth0"),
        ("192.168.1.3", "ib0"),
    ],
)
def test_the_interface_that_has_the_address(address: str, name: str) -> None:
    """Would not catch an interface that is down."""
    assert interface_of(address, INTERFACES) == name


def test_an_address_of_no_interface_is_refused_with_those_there_are() -> None:
    """A prefix of an address is none."""
    with pytest.raises(ConfigError, match=r"10\.0\.0\.30.*lo \(127\.0\.0\.1, ::1\), eth0 .*--node-ip-address="):
        interface_of("10.0.0.30", INTERFACES)


@pytest.fixture
def no_choice(monkeypatch):
    """An environment that names no interface, put back afterwards."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def chosen(address: str) -> tuple[str | None, str | None]:
    RankEnvironment(0, 4, 0, 0, address, address, 5000).choose_interfaces()
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


def test_gloo_and_nccl_use_the_nodes_own_network(no_choice) -> None:
    """On this machine's own interfaces. Would not catch a network that the other nodes cannot reach."""
    assert chosen("127.0.0.1") == ("lo", None)
    others = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name != "lo" and "." in entry.address
    }
    for name, address in others.items():
        no_choice.delenv("GLOO_SOCKET_IFNAME")
        no_choice.delenv("NCCL_SOCKET_IFNAME", raising=False)
        assert chosen(address) == (name, f"={name}")


def test_what_the_user_has_set_stays(no_choice) -> None:
    """Also where the address would say otherwise."""
    no_choice.setenv("GLOO_SOCKET_IFNAME", "eth7")
    no_choice.setenv("NCCL_SOCKET_IFNAME", "^docker")
    assert chosen("10.9.8.7") == ("eth7", "^docker")


def test_what_a_shell_says_of_its_network_and_gpus_reaches_every_rank(monkeypatch) -> None:
    """All but which GPUs a process sees, and what every rank gets anyway. Would not catch a variable that a library
    reads under another name.
    """
    for name in [name for name in os.environ if name.startswith(HANDED_ON)]:
        monkeypatch.delenv(name)
    given = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "TORCH_NCCL_ENABLE_TIMING": "1"}
    given |= {"VLLM_CACHE_ROOT": "/scratch", "NVTE_FLASH_ATTN": "0", "TRITON_CACHE_DIR": "/scratch/triton"}
    given |= {"FLASHINFER_WORKSPACE_BASE": "/scratch", "PYTORCH_TUNABLEOP_ENABLED": "0"}
    ours = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    for name, value in (given | ours | {"CUDA_VISIBLE_DEVICES": "3", "MY_NCCL_DEBUG": "WARN"}).items():
        monkeypatch.setenv(name, value)
    assert handed_on() == given
