"""List what would break with other versions of torch, vLLM, megatron-core and transformer-engine.

    python scripts/check_versions.py megatron-core==0.19.2 torch==2.11.0 transformer-engine==2.11.0
    python scripts/check_versions.py --moved outputs/upstream.json

Downloads wheels to a temporary folder and installs nothing. Names, arguments and attributes that the code and its
patches rely on (`versions/relied_on.py`) are looked for in the source; of transformer-engine also those that the
installed megatron-core imports, in its wheel without compiled parts. What patches replace (`versions/replaced.py`) is
compared with ours, how much it takes and returns, and with the text in the versions that are proven here: the installed
one, and unpacked ones in .venv/stacks. Modules of vLLM and megatron-core are imported in a process of their own, after
our patches (`versions/imports.py`). `--moved` looks at the newest version of each library that the file does not know,
and writes it there. Code 0: nothing would break, and nothing that is replaced or called has to be read again.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from versions.imports import Tried, try_imports, unpack
from versions.relied_on import LIBRARIES, REPOSITORY, Need, needs, needs_of_megatron
from versions.replaced import Replaced, all_replaced, arity_problems, changed_text, new_choices
from versions.upstream import moved
from versions.wheel_source import WheelSource

from third_party_patches import modules_for, patches_for

PLATFORMS = ("any", "manylinux2014_x86_64", "manylinux_2_24_x86_64", "manylinux_2_28_x86_64", "manylinux_2_31_x86_64")
SMALLEST = {"torch": ("macosx_14_0_arm64",)}
"""Of torch only Python is read: its wheel for another system is a tenth of that with CUDA's kernels."""
PYTHONS = ("3.12", "3.11")
COMPILED = ("torch-", "transformer_engine")
"""Beginnings of the names of wheels that are of no use without compiled parts that are not here."""
PATCHED = {"vllm": "vllm", "megatron": "megatron_core"}
DOWNLOAD_LIMIT_S = 900
MOE_LAYER = "megatron.core.transformer.moe.moe_layer.MoELayer"
MOE_SPEC = "megatron.core.models.gpt.moe_module_specs.get_moe_module_spec_for_backend"


class NotDownloaded(RuntimeError):
    """pip has no such wheel, or does not reach the index."""


def download(requirement: str, folder: Path) -> Path:
    """The wheel of `name==version`, for Linux or, of torch, the smallest. Raises NotDownloaded with pip's words."""
    message, kinds = "", SMALLEST.get(requirement.partition("=")[0], PLATFORMS)
    for python in PYTHONS:
        options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", str(folder), "--quiet"]
        platforms = [part for one in kinds for part in ("--platform", one)]
        command = [sys.executable, "-m", "pip", "download", *options, *platforms, requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S, check=False)
        if done.returncode == 0:
            return next(folder.glob("*.whl"))
        message = done.stderr.strip()
    raise NotDownloaded(f"{requirement} cannot be downloaded: {message}")


def problem(need: Need, wheel: WheelSource) -> str | None:
    """What is missing, or None."""
    found = wheel.find(need.path)
    if found is None:
        return "is not there"
    if not need.takes and need.at_most is None:
        return None
    names, is_open = wheel.takes(found)
    missing = sorted(need.takes - names.keys()) if not is_open else []
    if missing:
        return f"does not take {', '.join(missing)}"
    more = sorted(names.keys() - need.at_most) if need.at_most is not None else []
    return f"also takes {', '.join(more)}, which ours does not" if more else None


def definition(wheel: WheelSource, path: str) -> list[ast.AST]:
    """All of what a function or class consists of; nothing where it is not there."""
    found = wheel.find(path)
    return [] if found is None or found.definition is None else list(ast.walk(found.definition))


def experts_problems(wheel: WheelSource) -> list[str]:
    """Differences between the arguments with which Megatron builds experts and those that ours take."""
    ours = ast.parse((REPOSITORY / "megatron_rl" / "model" / "experts.py").read_text())
    (kind,) = [node for node in ours.body if isinstance(node, ast.ClassDef) and node.name == "StackedExperts"]
    (init,) = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    taken = {one.arg for one in [*init.args.args, *init.args.kwonlyargs]}
    found = []
    calls = [node for node in definition(wheel, MOE_LAYER) if isinstance(node, ast.Call)]
    builds = [node for node in calls if "self.submodules.experts" in map(ast.unparse, [node.func, *node.args[:1]])]
    if not builds:
        found.append(f"{MOE_LAYER} does not build its experts from submodules.experts")
    passed = {keyword.arg for node in builds for keyword in node.keywords if keyword.arg} - taken
    if passed:
        found.append(f"{MOE_LAYER} passes {', '.join(sorted(passed))} to its experts, which ours do not take")
    body = definition(wheel, MOE_SPEC)
    values = {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}
    returned = [node.value for node in body if isinstance(node, ast.Return) and node.value is not None]
    made = [values.get(ast.unparse(value), value) for value in returned]
    names = {ast.unparse(value.func) for value in made if isinstance(value, ast.Call)}
    if not names or not names <= {"ModuleSpec", "partial"}:
        found.append(f"{MOE_SPEC} returns {sorted(names) or 'something unknown'}, not a ModuleSpec or a partial")
    return found


def applies(builds: Sequence[str], not_needed: str, library: str, version: str) -> bool:
    """Whether this build of a library is one that a patch is applied to in this version."""
    spared = bool(not_needed) and SpecifierSet(not_needed).contains(version, prereleases=True)
    return library in builds and not spared


def replaced_in(library: str, version: str) -> list[Replaced]:
    """Functions of this build that patches replace in this version."""
    every = [one for one in all_replaced() if applies(one.distributions, one.not_needed, library, version)]
    return list({(one.user, one.path): one for one in every}.values())


def check(wheel: WheelSource, library: str, version: str) -> list[str]:
    """One line for each thing that would break, with its users."""
    lines: dict[str, set[str]] = {}
    for need in dict.fromkeys((*needs(), *needs_of_megatron())):
        if (
            applies(need.distributions, need.not_needed, library, version)
            and (what := problem(need, wheel)) is not None
        ):
            lines.setdefault(f"{need.path} {what}", set()).add(need.user)
    for one in replaced_in(library, version):
        if (found := wheel.find(one.path)) is not None:
            for what in arity_problems(one, found, wheel):
                lines.setdefault(f"{one.path} {what}", set()).add(one.user)
    if library == "megatron-core":
        for line in experts_problems(wheel):
            lines.setdefault(line, set()).add("megatron_rl/model")
    return [f"{line}  ({', '.join(sorted(users))})" for line, users in sorted(lines.items())]


def to_read(wheel: WheelSource, library: str, version: str, proven: dict[str, WheelSource]) -> list[str]:
    """One line for each replaced or called function that differs from all proven versions."""
    lines, sources, known = dict[str, None](), list(proven.values()), " or ".join(proven)
    for one in replaced_in(library, version):
        if changed := changed_text(one.path, wheel, sources):
            lines[f"{one.path} has changed since {known}: {changed} lines  (replaced by {one.user})"] = None
    for need in dict.fromkeys(needs()):
        is_asked = need.takes and applies(need.distributions, need.not_needed, library, version)
        if is_asked and (choices := new_choices(need.path, need.takes, wheel, sources)):
            lines[f"{need.path} has {', '.join(choices)}, not so in {known}  (called by {need.user})"] = None
    return list(lines)


def proven_sources(library: str) -> dict[str, WheelSource]:
    """Version -> source of what is installed of a library, and of what lies unpacked beside it."""
    package = next(name for name, builds in LIBRARIES.items() if library in builds)
    found = {}
    for folder in (*sys.path, *map(str, (REPOSITORY / ".venv" / "stacks").glob("*"))):
        for one in distributions(path=[folder]):
            if one.name in LIBRARIES[package] and (Path(folder) / package).is_dir():
                found.setdefault(one.version, WheelSource(Path(folder), [package]))
    return found


def imports(wheel: Path, library: str) -> Tried:
    """Imports of the modules that the code names, in the unpacked wheel."""
    if wheel.name.startswith(COMPILED) or any(part in wheel.name for part in ("macosx", "win_")):
        return Tried([], [])
    package = next(name for name, builds in LIBRARIES.items() if library in builds)
    source = WheelSource(wheel)
    paths = [one.path for one in needs() if library in one.distributions]
    modules = {found.module for path in paths if (found := source.find(path)) is not None}
    patches = [one for one in modules_for("cpu") if f".{PATCHED[package]}." in one]
    if library == "vllm":
        patches = [one for one in patches if one in modules_for("cuda")]
    with tempfile.TemporaryDirectory() as folder:
        return try_imports(unpack(wheel, Path(folder)), patches, sorted(modules))


def refusing(library: str, version: str) -> list[str]:
    """Patches whose range leaves this version out, because nobody has tried them with it."""
    found = []
    for patch in patches_for("cpu"):
        ranges = (patch.library.versions, *([patch.not_needed] if patch.not_needed else []))
        if library in patch.library.distributions and not any(SpecifierSet(one).contains(version) for one in ranges):
            found.append(patch.name)
    return found


def outside(library: str, version: str) -> str:
    """The range of the installed megatron-core for this library, where the version is not in it; else empty."""
    for one in map(Requirement, requires("megatron-core") or ()):
        if one.name == library and not one.specifier.contains(version, prereleases=True):
            return str(one.specifier)
    return ""


def library_of(requirement: str) -> str | None:
    """The build that a requirement or a wheel's path is of; None where nothing is known of it."""
    name = Path(requirement).name.replace("_", "-").partition("==")[0]
    known = [one for builds in LIBRARIES.values() for one in builds]
    return next(
        (one for one in known if name == one or name.startswith(f"{one}-") and requirement.endswith(".whl")), None
    )


def report(requirement: str, library: str) -> tuple[list[str], bool]:
    """(Lines about one version, whether there is nothing to do for it)."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(requirement) if requirement.endswith(".whl") else download(requirement, Path(folder))
        version, source = wheel.name.split("-")[1], WheelSource(wheel)
        tried = imports(wheel, library)
        broken, changed = [*tried.broken, *check(source, library, version)], []
        if proven := proven_sources(library):
            changed = to_read(source, library, version, proven)
        untried = refusing(library, version)
    lines = [f"{requirement}: {len(broken) or 'nothing known'} would break", *(f"  {line}" for line in broken)]
    if changed:
        lines += [f"  to be read again, {len(changed)}:", *(f"    {line}" for line in changed)]
    lines += [f"  cannot be tried on this machine: {line}" for line in tried.untried]
    if wanted := outside(library, version):
        lines.append(f"  megatron-core's own requirement leaves this version out: {wanted}")
    if untried:
        lines.append(f"  not tried with this version, and refused by their guards: {', '.join(untried)}")
    return lines, not broken and not changed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="*", metavar="NAME==VERSION or a wheel's path")
    parser.add_argument("--moved", type=Path, metavar="FILE", help="of what is newer than what this file knows")
    options = parser.parse_args(arguments)
    requirements = list(options.requirements)
    newest = moved(options.moved) if options.moved is not None else {}
    requirements += [f"{name}=={version}" for name, version in newest.items() if library_of(name) is not None]
    unknown = [one for one in requirements if library_of(one) is None]
    if unknown or not (requirements or options.moved):
        known = ", ".join(one for builds in LIBRARIES.values() for one in builds)
        parser.error(f"{', '.join(unknown) or 'nothing named'}: only of {known} is known what the code relies on")
    is_good = True
    for requirement in requirements:
        try:
            lines, nothing_to_do = report(requirement, str(library_of(requirement)))
        except NotDownloaded as error:
            lines, nothing_to_do = [str(error)], False
        print(*lines, sep="\n", flush=True)
        is_good &= nothing_to_do
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
