"""Parse and check RAY_ADDRESS, the HOST:PORT of a running Ray cluster, before any connection."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress

from megatron_rl.errors import ConfigError

LONGEST_LABEL, LONGEST_NAME = 63, 253
"""The most characters between two dots of a host's name, and in the whole name, by the rules of DNS."""
LAST_PORT = 65535
WORDS = ("auto", "local")
"""Words that Ray takes instead of an address: the cluster of this machine, or a new one."""
USUAL_PORT = 6379
EXAMPLE = f"10.0.0.1:{USUAL_PORT}"

_PORT = re.compile(r"[0-9]{1,5}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")


def parse(address: str) -> tuple[str, int]:
    """Return host, without the brackets of an IPv6 address, and port. Raises ConfigError with the broken rule."""
    fault = _fault(address)
    if fault:
        raise ConfigError(f"RAY_ADDRESS={address} is no HOST:PORT of a Ray cluster: {fault}; try: {_nearest(address)}")
    host, _, port = address.rpartition(":")
    return host[1:-1] if host.startswith("[") else host, int(port)


def _fault(address: str) -> str:
    """Return the rule that an address breaks; "" for a valid HOST:PORT."""
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
        return "" if _is_address(host[1:-1], 6) else f"{host} must have an IPv6 address in its brackets"
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
    if labels[-1].isdecimal() and not _is_address(host, 4):
        return f"{host} must be four numbers from 0 to 255"
    return ""


def _nearest(address: str) -> str:
    """Return the address without surplus and with missing parts, or an example: another scheme's port is not Ray's."""
    slim = "".join(address.split()).rstrip("/:")
    if slim in WORDS:
        return slim
    host, _, port = slim.rpartition(":")
    for mended in (slim, f"{slim}:{USUAL_PORT}", f"[{host}]:{port}", f"[{slim}]:{USUAL_PORT}"):
        if not _fault(mended):
            return mended
    return f"the address that `ray start --head` has printed, such as {EXAMPLE}"


def _is_address(host: str, version: int) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).version == version
    return False
