"""CPU seconds of a command and of all processes that it starts, daemons and forked ranks too, which `time` leaves out.

    python scripts/bench/cpu_seconds.py make test

The command runs in a control group of its own (cgroup 2, which root may make), whose seconds the kernel counts whatever
else the machine does. Where none can be made, only the machine's busy seconds are known, with all other work. Code:
the command's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path


def control_groups() -> Path | None:
    """Where cgroup 2 is mounted."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next((Path(place) for _, place, kind, *_ in mounts if kind == "cgroup2"), None)


def new_group() -> Path | None:
    """A control group without processes; None if none can be made."""
    mounted = control_groups()
    if mounted is None:
        return None
    group = mounted / f"cpu_seconds_{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    return group


def group_seconds(group: Path) -> float:
    """CPU seconds of all processes that have been in a group."""
    lines = (line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return next(int(value) for name, value in lines if name == "usage_usec") / 1e6


def busy_seconds() -> float:
    """CPU seconds of the whole machine since it started, without idle ones and waiting for disks."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main(command: list[str]) -> int:
    """Run the command; its code."""
    if not command:
        sys.exit(__doc__)
    group = new_group()
    busy, started = busy_seconds(), time.monotonic()
    join = None if group is None else partial((group / "cgroup.procs").write_text, "0")
    code = subprocess.run(command, preexec_fn=join, check=False).returncode
    wall, busy = time.monotonic() - started, busy_seconds() - busy
    own = "unknown: no control group could be made" if group is None else f"{group_seconds(group):.0f}"
    print(f"CPU seconds: {own}; of the whole machine: {busy:.0f}; wall: {wall:.0f}", flush=True)
    if group is not None and not (group / "cgroup.procs").read_text():
        group.rmdir()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
