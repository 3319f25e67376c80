"""What a patch declares, and the version guard in front of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet


class PatchError(RuntimeError):
    """A library's installed version is not one that the patch was written for."""


@dataclass(frozen=True)
class Patch:
    """One change to one library.

    distributions: names on the package index, as `importlib.metadata` knows them, of the library's builds.
    versions: PEP 440 range the patch was written and tested for.
    not_needed: a range in which the library does by itself what the patch is for, so that it is left out.
    drop_when: the upstream change that would make it unnecessary.
    """

    name: str
    distributions: tuple[str, ...]
    versions: str
    drop_when: str
    apply: Callable[[], None]
    not_needed: str = ""


def is_needed(patch: Patch) -> bool:
    """Whether the installed version of the library lacks what the patch is for. Raises PatchError as below."""
    _, installed = installed_build(patch)
    return not patch.not_needed or not SpecifierSet(patch.not_needed).contains(installed, prereleases=True)


def require_version(patch: Patch) -> None:
    """Raise PatchError unless a build of the patched library is installed in a version inside `patch.versions`."""
    name, installed = installed_build(patch)
    if not SpecifierSet(patch.versions).contains(installed, prereleases=True):
        raise PatchError(
            f"patch {patch.name!r} is for {name}{patch.versions}; installed is {installed}. "
            f"Install a version in that range, or check whether the patch can go: {patch.drop_when}"
        )


# Reading it takes 5 ms, and 17 patches ask twice for three libraries.
_version = functools.cache(version)


def installed_build(patch: Patch) -> tuple[str, str]:
    """(name, version) of the first of the patch's distributions that is installed; PatchError when none is."""
    for name in patch.distributions:
        try:
            return name, _version(name)
        except PackageNotFoundError:
            continue
    wanted = " or ".join(f"{name}{patch.versions}" for name in patch.distributions)
    raise PatchError(f"patch {patch.name!r} is for {wanted}, which is not installed")
