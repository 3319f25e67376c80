"""What a patch declares, and the version guard in front of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet


class PatchError(RuntimeError):
    """A library's installed version is not one that the patch was written for."""


@dataclass(frozen=True)
class Patch:
    """One change to one library.

    distribution: name on the package index, as `importlib.metadata` knows it.
    versions: PEP 440 range the patch was written and tested for.
    drop_when: the upstream change that would make it unnecessary.
    """

    name: str
    distribution: str
    versions: str
    drop_when: str
    apply: Callable[[], None]


def require_version(patch: Patch) -> None:
    """Raise PatchError unless the patched library is installed in a version inside `patch.versions`."""
    try:
        installed = version(patch.distribution)
    except PackageNotFoundError:
        raise PatchError(
            f"patch {patch.name!r} is for {patch.distribution}{patch.versions}, which is not installed"
        ) from None
    if not SpecifierSet(patch.versions).contains(installed, prereleases=True):
        raise PatchError(
            f"patch {patch.name!r} is for {patch.distribution}{patch.versions}; installed is {installed}. "
            f"Install a version in that range, or check whether the patch can go: {patch.drop_when}"
        )
