"""List what would break with other versions of vLLM, megatron-core and transformer-engine.

    python scripts/check_versions.py megatron-core==0.19.2 vllm==0.24.0 transformer-engine==2.11.0

Downloads the wheels to a temporary folder, installs nothing and runs nothing of them: names, arguments and attributes
that the code and its patches rely on (`versions/relied_on.py`) are looked for in the source; of transformer-engine also
those that the installed megatron-core imports, in its wheel without compiled parts. Code 0: all are there.
That a name is there does not mean that it still does the same.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from versions.relied_on import LIBRARIES, REPOSITORY, Need, needs, needs_of_megatron
from versions.wheel_source import WheelSource

from third_party_patches import patches_for

PLATFORMS = ("any", "manylinux2014_x86_64", "manylinux_2_24_x86_64", "manylinux_2_28_x86_64", "manylinux_2_31_x86_64")
PYTHONS = ("3.12", "3.11")
DOWNLOAD_LIMIT_S = 900
MOE_LAYER = "megatron.core.transformer.moe.moe_layer.MoELayer"
MOE_SPEC = "megatron.core.models.gpt.moe_module_specs.get_moe_module_spec_for_backend"


def download(requirement: str, folder: Path) -> Path:
    """The wheel of `name==version`, for Linux. Raises SystemExit with pip's words where there is none."""
    message = ""
    for python in PYTHONS:
        options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", str(folder), "--quiet"]
        platforms = [part for one in PLATFORMS for part in ("--platform", one)]
        command = [sys.executable, "-m", "pip", "download", *options, *platforms, requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S, check=False)
        if done.returncode == 0:
            return next(folder.glob("*.whl"))
        message = done.stderr.strip()
    raise SystemExit(f"{requirement} cannot be downloaded: {message}")


def problem(need: Need, wheel: WheelSource) -> str | None:
    """What is missing, or None."""
    found = wheel.find(need.path)
    if found is None:
        return "is not there"
    if not need.takes and need.at_most is None:
        return None
    names, is_open = wheel.takes(found)
    missing = sorted(need.takes - names) if not is_open else []
    if missing:
        return f"does not take {', '.join(missing)}"
    more = sorted(names - need.at_most) if need.at_most is not None else []
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


def check(wheel: WheelSource, library: str, version: str) -> list[str]:
    """One line for each thing that would break, with its users."""
    lines: dict[str, set[str]] = {}
    for need in (*needs(), *needs_of_megatron()):
        spared = bool(need.not_needed) and SpecifierSet(need.not_needed).contains(version, prereleases=True)
        if library in need.distributions and not spared and (what := problem(need, wheel)) is not None:
            lines.setdefault(f"{need.path} {what}", set()).add(need.user)
    if library == "megatron-core":
        for line in experts_problems(wheel):
            lines.setdefault(line, set()).add("megatron_rl/model")
    return [f"{line}  ({', '.join(sorted(users))})" for line, users in sorted(lines.items())]


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="+", metavar="NAME==VERSION or a wheel's path")
    broken = 0
    for requirement in parser.parse_args(arguments).requirements:
        name = Path(requirement).name.replace("_", "-") if requirement.endswith(".whl") else requirement
        known = [one for builds in LIBRARIES.values() for one in builds]
        library = next((one for one in known if name.startswith(one)), None)
        if library is None:
            parser.error(f"{requirement}: only of {', '.join(known)} is known what the code relies on")
        with tempfile.TemporaryDirectory() as folder:
            wheel = Path(requirement) if requirement.endswith(".whl") else download(requirement, Path(folder))
            version = wheel.name.split("-")[1]
            lines, untried = check(WheelSource(wheel), library, version), refusing(library, version)
        broken += len(lines)
        print(f"{requirement}: {len(lines) or 'nothing'} would break", *lines, sep="\n  ")
        if wanted := outside(library, version):
            print(f"  megatron-core's own requirement leaves this version out: {wanted}")
        if untried:
            print(f"  not tried with this version, and refused by their guards: {', '.join(untried)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
