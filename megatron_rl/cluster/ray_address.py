"""HOST:PORT of a running Ray cluster, as RAY_ADDRESS names it, taken apart before anything asks for it."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress

from megatron_rl.errors import ConfigError

LONGEST_LABEL, LONGEST_NAME = 63, 253
"""Characters between two dots of a host's name, and of all of it, by the rules of DNS."""
LAST_PORT = 65535
WORDS = ("auto", "local")
"""What Ray takes in place of an address: its cluster on this machine, or one of its own."""
USUAL_PORT = 6379
EXAMPLE = f"10.0.0.1:{USUAL_PORT}"

_PORT = re.compile(r"[0-9]{1,5}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")


def parse(address: str) -> tuple[str, int]:
    """Host, an IPv6 address without its brackets, and port. Raises ConfigError with the rule that is broken."""
    fault = _fault(address)
    if fault:
        raise ConfigError(
            f"RAY_ADDRESS={address} is no HOST:PORT of a Ray cluster: {fault}; nearest: {_nearest(address)}"
        )
    host, _, port = address.rpartition(":")
    return host[1:-1] if host.startswith("[") else host, int(port)


def _fault(address: str) -> str:
    """The rule that an address breaks; empty where it is HOST:PORT."""
    if address.startswith("ray://"):
        return "a ray:// address is for Ray's client, which cannot hold a run"
    if "/" in address:
        return "it takes neither a scheme nor a path"
    if any(character.isspace() for character in address):
        return "it takes no spaces"
    host, colon, port = address.rpartition(":")
    if not colon or (host.startswith("[") and not host.endswith("]")):
        return "it has no port"
    if not _PORT.fullmatch(port) or not 0 < int(port) <= LAST_PORT:
        return f"the port {port!r} must be a number from 1 to {LAST_PORT}"
    return _host_fault(host)


def _host_fault(host: str) -> str:
    if not host:
        return "it has no host"
    if host.startswith("["):
        return "" if _is_ipv6(host[1:-1]) else f"{host} must have an IPv6 address in its brackets"
    if ":" in host:
        return "an IPv6 address needs brackets"
    labels = host.removesuffix(".").split(".")
    for label in labels:
        if not label:
            return f"the host {host!r} has nothing between two dots, or before the first"
        if len(label) > LONGEST_LABEL:
            return f"{label!r} has {len(label)} characters, and a part of a host's name has {LONGEST_LABEL} at most"
        if not _LABEL.fullmatch(label):
            return f"{label!r} must consist of ASCII letters, digits, _ and -, with no - at either end"
    if len(host) > LONGEST_NAME:
        return f"the host has {len(host)} characters, and a name has {LONGEST_NAME} at most"
    if labels[-1].isdecimal() and not _is_ipv4(host):
        return f"{host} must be four numbers from 0 to 255"
    return ""


def _nearest(address: str) -> str:
    """The address with what is missing or too much mended, or an example: another scheme's port is not Ray's."""
    slim = "".join(address.split()).rstrip("/:")
    if slim in WORDS:
        return slim
    host, _, port = slim.rpartition(":")
    for mended in (slim, f"{slim}:{USUAL_PORT}", f"[{host}]:{port}", f"[{slim}]:{USUAL_PORT}"):
        if not _fault(mended):
            return mended
    return f"the address that `ray start --head` has printed, such as {EXAMPLE}"


def _is_ipv4(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.IPv4Address(host)
        return True
    return False


def _is_ipv6(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.IPv6Address(host)
        return True
    return False
