"""Wait until the Ray cluster of RAY_ADDRESS has enough nodes: exit code 0, or 1 with what it has when time is over.

Exit code 2 where that is no address.

RAY_ADDRESS=node0:6379 python scripts/cluster/wait_for_nodes.py --nodes 8 --resource GPU --count 8 --timeout 600
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

import ray

from megatron_rl.cluster import ray_address
from megatron_rl.errors import ConfigError


def enough(nodes: list[dict], resource: str, count: int) -> list[str]:
    """Names of the living nodes of `ray.nodes()` that have at least `count` of `resource`, in use or not."""
    living = [node for node in nodes if node["Alive"] and node["Resources"].get(resource, 0) >= count]
    return [node["NodeName"] for node in living]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Wait until a Ray cluster has enough nodes.")
    parser.add_argument("--nodes", type=int, required=True, help="nodes that must be there")
    parser.add_argument("--resource", choices=("GPU", "CPU"), default="GPU", help="what they are counted by")
    parser.add_argument("--count", type=int, default=8, help="of it on each node, at least")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    args = parser.parse_args()

    address = os.environ["RAY_ADDRESS"]
    try:
        if address not in ray_address.WORDS:
            ray_address.parse(address)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    deadline = time.monotonic() + args.timeout
    found: list[str] = []
    refusal = ""
    while True:
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            found = enough(ray.nodes(), args.resource, args.count)
        except ConnectionError as error:  # the head may still be starting
            refusal = f"; {error}; RAY_AUTH_MODE and the token must be those of Ray's head"
        if len(found) >= args.nodes:
            print(f"{len(found)} nodes with {args.count} {args.resource}s each at {address}: {' '.join(found)}")
            return 0
        if time.monotonic() > deadline:
            print(
                f"{address} has {len(found)} of {args.nodes} nodes with {args.count} {args.resource}s each "
                f"after {args.timeout:g} s: {' '.join(found) or 'none'}{refusal}",
                file=sys.stderr,
            )
            return 1
        time.sleep(2)


if __name__ == "__main__":
    sys.exit(main())
