"""Fetch what a lent GPU machine lacks into one folder: the wheels of carried.txt, and vLLM's allocator of memory.

    python scripts/gpu_day/fetch_wheels.py [--out scripts/gpu_day/wheels] [--without-cumem]

Where there is a package index; pip downloads vLLM's CUDA wheel (0.3 GB) into a temporary folder for the allocator's
0.1 MB. Raises ValueError where the folder has more than 50 MB, or not exactly one wheel of each package.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from listed import CARRIED, listed, normal
from take_cumem import take

WHEELS = Path(__file__).parent / "wheels"
CUMEM = "cumem"
VLLM = "vllm==0.32.0"
MOST_BYTES = 50_000_000
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def download(requirements: list[str], folder: Path) -> None:
    """Download wheels for the machine's Python, whatever this one is, and nothing that they need."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    options += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), *requirements], check=True
    )


def check(folder: Path, wanted: Mapping[str, str]) -> int:
    """The bytes of the folder. Raises ValueError, which says what to do, where it is not what is carried."""
    found = Counter(tuple(file.name.split("-")[:2]) for file in folder.glob("*.whl"))
    there = Counter({f"{normal(name)}=={version}": count for (name, version), count in found.items()})
    expected = Counter(f"{name}=={version}" for name, version in wanted.items())
    if there != expected:
        raise ValueError(
            f"{folder} holds {sorted(there.elements())}, and {CARRIED.name} names {sorted(expected)}: remove the "
            "folder, and fetch again"
        )
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > MOST_BYTES:
        raise ValueError(
            f"{folder} has {size / 1e6:.1f} MB, and at most {MOST_BYTES / 1e6:g} may be carried: shorten it"
        )
    return size


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=WHEELS)
    parser.add_argument("--without-cumem", action="store_true", help="without vLLM's allocator, which part 2 needs")
    given = parser.parse_args()
    wanted = listed(CARRIED)
    given.out.mkdir(parents=True, exist_ok=True)
    download([f"{name}=={version}" for name, version in wanted.items()], given.out)
    if not given.without_cumem:
        with tempfile.TemporaryDirectory() as scratch:
            download([VLLM], Path(scratch))
            (wheel,) = Path(scratch).glob("*.whl")
            if not take(wheel, given.out / CUMEM):
                raise ValueError(f"{wheel.name} has no compiled allocator: only wheels for CUDA have")
    size = check(given.out, wanted)
    print(f"{given.out}: {len(wanted)} wheels, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
