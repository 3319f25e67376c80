"""The compiled core of transformer-engine, of which exactly one must be installed: that for torch's CUDA.

Cores of two CUDA versions put their libraries into one folder, where the later one replaces files of the earlier. uv
installs both for the extra `te`: it reads an older requirement of the source package.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

PACKAGE = "transformer-engine"
CUDA_MAJORS = ("11", "12", "13")


def installed_version(path: Sequence[str] | None = None) -> str:
    """Return the version of transformer-engine, "" where it is not installed. path: folders; None: Python's own."""
    return next((found.version for found in _found(PACKAGE, path)), "")


def installed_cores(path: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return CUDA's major versions of the cores that are installed."""
    return tuple(major for major in CUDA_MAJORS if _found(f"{PACKAGE}-cu{major}", path))


def core_problem(cores: Sequence[str], cuda: str) -> str:
    """Return what is wrong with these cores and how to fix it; "" for nothing. cuda: of torch, "" for none.

    Without a core Megatron's import fails with a message.
    """
    names = [f"{PACKAGE}-cu{major}" for major in cores]
    own = cuda.split(".")[0]
    wrong = [name for name, major in zip(names, cores, strict=True) if own and major != own]
    if len(cores) <= 1 and not wrong:
        return ""
    has = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} installed"
    needed = f"{PACKAGE}-cu{own}" if own else "one of them"
    again = f"pip install --force-reinstall --no-deps {needed}" if own else "pip install the one that is needed again"
    torch = f"torch for CUDA {cuda}" if own else "torch"
    return f"{has}, and {torch} needs {needed} alone: pip uninstall {' '.join(names)}, then {again}"


def _found(name: str, path: Sequence[str] | None) -> list[metadata.Distribution]:
    if path is None:
        return list(metadata.Distribution.discover(name=name))
    return list(metadata.Distribution.discover(name=name, path=list(path)))
