"""What differs by family is stated by its parts: nothing else asks for a family's name or for the kind of a part."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_rl"
COMPOSING = ("model/families/", "model/parts/")
PUTS = {"model/layer_specs.py"}
"""Files that put the module of each kind of part into a layer."""
PARTS = {"GroupedAttention", "LatentAttention", "GatedMLP", "ExpertsMLP", "LatentKeys"}
OF_FAMILY = {"latent", "latent_attention", "is_moe"}
NAMES = {"family.architecture", "model.family.architecture", "self.family.architecture"}


def branches(source: str) -> Iterator[str]:
    """Conditions of a source that ask what family or what kind of part something is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield from _asking(node.test)
        elif isinstance(node, ast.comprehension):
            yield from (found for test in node.ifs for found in _asking(test))
        elif isinstance(node, ast.Match):
            yield from _asking(node)


def _asking(test: ast.AST) -> Iterator[str]:
    for node in ast.walk(test):
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            yield from sorted(names & PARTS)
        elif isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name) and node.cls.id in PARTS:
            yield node.cls.id
        elif isinstance(node, ast.Attribute) and (node.attr in OF_FAMILY or ast.unparse(node) in NAMES):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith("ForCausalLM"):
            yield node.value


def test_only_families_and_parts_ask_what_they_are() -> None:
    """Would not catch a condition that is computed elsewhere and passed on."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        asked = set(branches(path.read_text()))
        if asked and not name.startswith(COMPOSING) and name not in PUTS:
            found[name] = asked
    assert found == {}


def test_a_branch_is_found() -> None:
    """In an if, in a comprehension and by a name."""
    assert set(branches("if model.latent is not None: pass")) == {"latent"}
    assert set(branches("[p for p in parts if isinstance(p, GatedMLP)]")) == {"GatedMLP"}
    assert set(branches("x = 1 if name == 'LlamaForCausalLM' else 2")) == {"LlamaForCausalLM"}
