"""Take vLLM's allocator out of its CUDA wheel, or of where vLLM is installed, for a machine without vLLM.

    pip download --no-deps vllm==0.32.0 --dest wheels           # where there is a package index
    python scripts/gpu_day/take_cumem.py wheels/vllm-*.whl cumem
    PYTHONPATH=cumem python scripts/gpu_day/part3_cumem.py      # there

The compiled part uses Python's stable interface and the driver, no symbol of torch. What the Python part imports of the
rest of vLLM is replaced by a few lines. Code 0: taken, 1: the wheel has no compiled part, as those for CPUs.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

TAKEN = (
    "vllm/device_allocator/__init__.py",
    "vllm/device_allocator/alloc_conf.py",
    "vllm/device_allocator/cumem.py",
    "vllm/distributed/device_communicators/cuda_wrapper.py",
)
COMPILED = "vllm/cumem_allocator"
PLATFORM = """
class CudaPlatform:
    device_type = "cuda"

    def is_cuda_alike(self):
        return True

    def is_cuda(self):
        return True

    def is_rocm(self):
        return False

    def is_xpu(self):
        return False


current_platform = CudaPlatform()
"""
LOADED = """
def find_loaded_library(lib_name):
    with open("/proc/self/maps") as maps:
        paths = [line[line.index("/") :].strip() for line in maps if "/" in line]
    starts = (f"{lib_name}.", f"{lib_name}-")
    return next((path for path in paths if path.rsplit("/", 1)[-1].startswith(starts)), None)
"""
STANDING_IN = {
    "vllm/__init__.py": "",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/device_communicators/__init__.py": "",
    "vllm/envs.py": "VLLM_CUDART_SO_PATH = None\n",
    "vllm/logger.py": "from logging import getLogger as init_logger\n",
    "vllm/platforms.py": PLATFORM,
    "vllm/utils/__init__.py": "",
    "vllm/utils/system_utils.py": LOADED,
    "vllm/utils/torch_utils.py": "PIN_MEMORY = True\n",
}
"""File -> what the allocator needs of it."""


def take(source: Path, folder: Path) -> list[str]:
    """Write the files; return the names of the compiled ones. source: a wheel, or the folder that vllm/ lies in."""
    whole = source if source.is_dir() else zipfile.Path(source)
    compiled = [f"vllm/{one.name}" for one in (whole / "vllm").iterdir() if f"vllm/{one.name}".startswith(COMPILED)]
    content = {name: text.encode() for name, text in STANDING_IN.items()}
    content |= {name: (whole / name).read_bytes() for name in (*TAKEN, *compiled)}
    for name, written in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(written)
    return compiled


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a wheel, or the folder that vllm/ lies in")
    parser.add_argument("folder", type=Path, help="where to write; goes into PYTHONPATH")
    given = parser.parse_args()
    compiled = take(given.source, given.folder)
    print(f"taken into {given.folder}: {', '.join(compiled) or 'no compiled part, which only wheels for CUDA have'}")
    return 0 if compiled else 1


if __name__ == "__main__":
    sys.exit(main())
