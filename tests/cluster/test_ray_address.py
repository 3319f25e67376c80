"""RAY_ADDRESS as users mistype it: refused with the rule and the nearest address, before anything asks for it."""

from __future__ import annotations

import pytest

from megatron_rl.cluster import ray_address
from megatron_rl.errors import ConfigError

EXAMPLE = "such as 10.0.0.1:6379"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1:6379", ("10.0.0.1", 6379)),
        ("node-0.ray_head.svc.cluster.local:1", ("node-0.ray_head.svc.cluster.local", 1)),
        ("node0.:65535", ("node0.", 65535)),
        (f"{'x' * 63}:6379", ("x" * 63, 6379)),
        ("[::1]:6379", ("::1", 6379)),
        ("[fe80::1%eth0]:6379", ("fe80::1%eth0", 6379)),
    ],
)
def test_host_and_port(address: str, expected: tuple[str, int]) -> None:
    """Would not catch an address that Ray itself cannot read."""
    assert ray_address.parse(address) == expected


@pytest.mark.parametrize(
    ("address", "rule", "nearest"),
    [
        ("node0..cluster:6379", "nothing between two dots", EXAMPLE),
        (".node0:6379", "nothing between two dots, or before the first", EXAMPLE),
        (f"{'x' * 64}:6379", "has 64 characters, and a part of a host's name has 63 at most", EXAMPLE),
        (f"{'.'.join(['x' * 60] * 5)}:6379", "has 304 characters, and a name has 253 at most", EXAMPLE),
        ("käse:6379", "ASCII letters, digits, _ and -", EXAMPLE),
        ("-node:6379", "no - at either end", EXAMPLE),
        ("user@node0:6379", "ASCII letters", EXAMPLE),
        ("10.0.0.256:6379", "four numbers from 0 to 255", EXAMPLE),
        (":6379", "no host", EXAMPLE),
        ("10.0.0.1", "no port", "10.0.0.1:6379"),
        ("node0:", "the port '' must be a number from 1 to 65535", "node0:6379"),
        ("node0:0", "the port '0' must", EXAMPLE),
        ("node0:70000", "the port '70000' must", EXAMPLE),
        ("node0:-1", "the port '-1' must", EXAMPLE),
        ("node0:٦٣٧٩", "must be a number from 1 to 65535", EXAMPLE),
        ("node0:http", "the port 'http' must", EXAMPLE),
        ("node0: 6379", "no spaces", "node0:6379"),
        ("node0:6379\n", "no spaces", "node0:6379"),
        ("auto ", "no spaces", "auto"),
        ("::1:6379", "needs brackets", "[::1]:6379"),
        ("fe80::1", "needs brackets", "[fe80::1]:6379"),
        ("[::1]", "no port", "[::1]:6379"),
        ("[node0]:6379", "an IPv6 address in its brackets", EXAMPLE),
        ("[[::1]]:6379", "an IPv6 address in its brackets", EXAMPLE),
        ("node0:6379/", "neither a scheme nor a path", "node0:6379"),
        ("http://10.0.0.1:8265", "neither a scheme nor a path", EXAMPLE),
        ("ray://10.0.0.1:10001", "for Ray's client, which cannot hold a run", EXAMPLE),
    ],
)
def test_what_is_no_address(address: str, rule: str, nearest: str) -> None:
    """What is offered is an address, or an example of one. Would not catch a name that nobody has."""
    with pytest.raises(ConfigError) as refused:
        ray_address.parse(address)
    fault, offered = (
        str(refused.value).removeprefix(f"RAY_ADDRESS={address} is no HOST:PORT of a Ray cluster: ").split("; try: ")
    )
    assert rule in fault and offered.endswith(nearest)
    if nearest not in (EXAMPLE, *ray_address.WORDS):
        ray_address.parse(offered)
