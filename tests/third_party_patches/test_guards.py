"""What every patch declares, and the version guard in front of it."""

import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import third_party_patches
from third_party_patches import (
    COMMON_PATCHES,
    CPU_PATCHES,
    DRIVER_PATCHES,
    REHEARSAL_PATCHES,
    Patch,
    PatchError,
    patches_for,
    require_version,
)
from third_party_patches.guard import Library

ROOT = Path(third_party_patches.__file__).parent


def patch_for(distribution, versions, name="demo.patch", applied=(), **options):
    def apply():
        applied.append(name)

    apply.__module__ = f"third_party_patches.{name}"
    return Patch(Library((distribution,), versions), apply, drop_when="upstream is mended", **options)


def test_an_unknown_version_is_refused_by_name():
    """Patch, range, installed version and way out. Would not catch a range that is too wide."""
    installed = version("torch")
    with pytest.raises(PatchError) as raised:
        require_version(patch_for("torch", "<2.0"))
    for part in ("'demo.patch'", "torch<2.0", f"installed is {installed}", "upstream is mended"):
        assert part in str(raised.value)


def test_a_missing_library_is_refused_by_name():
    """A distribution that nobody installs. Would not catch one whose import name differs."""
    with pytest.raises(PatchError, match=r"'demo\.patch' is for no-such-library==1\.0, which is not installed"):
        require_version(patch_for("no-such-library", "==1.0"))


def test_a_known_version_is_accepted():
    """Local build labels like +cpu do not matter. Would not catch an accepted pre-release that is broken."""
    plain = version("torch").split("+")[0]
    require_version(patch_for("torch", f"=={plain}"))
    require_version(patch_for("torch", f">={plain}"))


def test_apply_patches_checks_every_version_before_it_changes_anything(monkeypatch):
    """The last of three is refused and the first is not applied. Would not catch an apply that fails half-way."""
    applied = []
    good = patch_for("torch", ">=1", "good", applied)
    monkeypatch.setattr(
        third_party_patches, "patches_for", lambda kind, generates: [good, good, patch_for("torch", "<2.0")]
    )
    with pytest.raises(PatchError):
        third_party_patches.apply_patches("cpu")
    assert applied == []


def test_a_patch_that_is_not_needed_is_left_out(monkeypatch):
    """Whatever its range, and only in the versions that it names. Would not catch a library that does it otherwise."""
    applied = []
    found = [
        patch_for("torch", ">=1", "later", applied, not_needed=">=99"),
        patch_for("torch", ">=1", "mended", applied, not_needed=">=1"),
        patch_for("torch", "<2.0", "unknown", applied, not_needed=">=2.0"),
    ]
    monkeypatch.setattr(third_party_patches, "patches_for", lambda kind, generates: found)
    assert third_party_patches.apply_patches("cpu") == applied == ["later"]


ALL_PATCHES = COMMON_PATCHES + CPU_PATCHES + DRIVER_PATCHES + REHEARSAL_PATCHES


@pytest.mark.parametrize("name", ALL_PATCHES)
def test_every_patch_says_why_what_and_how_long(name):
    """Docstring and declaration, installed here. Would not catch a reason that is no longer true."""
    module = importlib.import_module(name)
    assert "Reason: " in module.__doc__ and "What it does: " in module.__doc__
    assert len(module.PATCH.drop_when) > 20
    assert module.PATCH.name == name.removeprefix("third_party_patches.")
    require_version(module.PATCH)


def test_every_patch_file_is_listed_once():
    """No patch is forgotten in the package. Would not catch one applied from elsewhere."""
    files = {path for path in ROOT.glob("*/*.py") if path.name != "__init__.py"}
    names = [str(path.relative_to(ROOT.parent).with_suffix("")).replace("/", ".") for path in files]
    assert sorted(names) == sorted(ALL_PATCHES)
    kinds = (("cpu", COMMON_PATCHES + CPU_PATCHES), ("cuda", COMMON_PATCHES), ("driver", DRIVER_PATCHES))
    for kind, expected in (*kinds, ("rehearsal", COMMON_PATCHES + REHEARSAL_PATCHES)):
        found = [f"third_party_patches.{patch.name}" for patch in patches_for(kind)]
        assert found == list(expected)


def test_importing_changes_nothing():
    """No engine is loaded and torch is as it was. Would not catch a change made only when CUDA is present."""
    names = ["third_party_patches", *ALL_PATCHES]
    program = f"""
import sys, importlib, torch
before = torch.Tensor.cuda, torch.Tensor.type, torch.nn.Module.cuda, torch.zeros, torch.cuda
for name in {names!r}:
    importlib.import_module(name)
loaded = [name for name in sys.modules if name.split(".")[0] in ("megatron", "ray", "vllm")]
assert not loaded, loaded
assert before == (torch.Tensor.cuda, torch.Tensor.type, torch.nn.Module.cuda, torch.zeros, torch.cuda)
"""
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_where_nothing_is_generated_vllm_is_left_alone():
    """Would not catch a patch of another library that imports it."""
    found = patches_for("cpu", generates=False)
    assert found and not [patch.name for patch in found if patch.name.startswith("vllm.")]
