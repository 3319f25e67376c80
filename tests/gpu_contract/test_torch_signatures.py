"""Calls of young functions of torch against the signatures of 2.11, the oldest torch that GPU machines come with."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.model import attention
from megatron_rl.model.segments import Segments

REPOSITORY = Path(__file__).parents[2]
ON_GPUS = ("megatron_rl", "scripts/gpu_check_steps", "scripts/gpu_day")

OLDEST = {
    "torch.nn.attention.varlen.varlen_attn": (
        "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)"
    ),
    "torch.nn.attention.activate_flash_attention_impl": "impl",
    "torch.nn.attention.flex_attention.flex_attention": (
        "query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, "
        "kernel_options=None, *, return_aux=None"
    ),
    "torch.nn.functional.grouped_mm": "mat_a, mat_b, *, offs=None, bias=None, out_dtype=None",
    "torch.nn.functional.scaled_mm": (
        "mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None, swizzle_b=None, bias=None, "
        "output_dtype=None, contraction_dim=(), use_fast_accum=False"
    ),
    "torch.ops.aten._flash_attention_forward": (
        "query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, "
        "scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None"
    ),
    "torch.ops.aten._flash_attention_backward": (
        "grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, "
        "rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None"
    ),
}
"""Function -> its parameters in torch 2.11.0, read from its wheel."""


def with_signature(parameters: str, body: str = "locals()") -> Callable[..., Any]:
    """A function with these parameters."""
    made: Callable[..., Any] = eval(f"lambda {parameters}: {body}")
    return made


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Every call of something of torch, with its whole name."""
    names = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname: each.name for each in node.names if each.asname and each.name.startswith("torch")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, _, rest = ast.unparse(node.func).partition(".")
            if first in names:
                yield f"{names[first]}.{rest}".rstrip("."), node


def refused(source: str) -> list[str]:
    """The calls that torch 2.11 would refuse. What a star stands for is not counted."""
    found = []
    for name, call in calls(ast.parse(source)):
        if name in OLDEST:
            stars = any(isinstance(each, ast.Starred) for each in call.args)
            options = {each.arg: None for each in call.keywords if each.arg}
            try:
                inspect.signature(with_signature(OLDEST[name])).bind_partial(*([] if stars else call.args), **options)
            except TypeError as error:
                found.append(f"{name}: {error}")
    return found


def test_calls_fit_the_oldest_torch() -> None:
    """All of the package and of the scripts for GPUs. Would not catch what a dict of options brings: the next test."""
    sources = {file: file.read_text() for folder in ON_GPUS for file in (REPOSITORY / folder).rglob("*.py")}
    assert [(file.name, each) for file, source in sources.items() for each in refused(source)] == []
    called = {name for source in sources.values() for name, _ in calls(ast.parse(source))}
    assert len(called & OLDEST.keys()) >= 5
    newer = "from torch.nn.attention.varlen import varlen_attn as f\nf(1, 2, enable_gqa=True)"
    assert refused(newer) == ["torch.nn.attention.varlen.varlen_attn: got an unexpected keyword argument 'enable_gqa'"]


def test_the_installed_torch_has_only_more() -> None:
    """Positions are the same, and no name has gone. Would not catch another meaning."""
    for name, parameters in OLDEST.items():
        module, _, own = name.rpartition(".")
        if not name.startswith("torch.ops"):
            oldest = inspect.signature(with_signature(parameters)).parameters
            newest = inspect.signature(getattr(import_module(module), own)).parameters
            ordered = [each.name for each in oldest.values() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
            assert oldest.keys() <= newest.keys() and [*newest][: len(ordered)] == ordered, name


@pytest.mark.parametrize("heads", [4, 2])
def test_packed_attention_asks_for_groups_where_it_can(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch of 2.11's signature gets no `enable_gqa`, the installed one does. Would not catch kernels that differ."""
    query, key = torch.zeros(3, 4, 8), torch.zeros(3, heads, 8)
    segments, given = Segments.of([3], torch.device("cpu")), dict[str, Any]()

    def standing_in(parameters: str) -> Callable[..., Any]:
        named = with_signature(parameters)

        def varlen_attn(*args: Any, **options: Any) -> torch.Tensor:
            given.update(named(*args, **options))
            return query

        varlen_attn.__signature__ = inspect.signature(named)  # type: ignore[attr-defined]
        return varlen_attn

    oldest = OLDEST["torch.nn.attention.varlen.varlen_attn"]
    for parameters, asked in ((oldest, None), (f"{oldest}, enable_gqa=False", heads != 4)):
        given.clear()
        monkeypatch.setattr(attention, "varlen_attn", standing_in(parameters))
        assert attention.varlen(query, key, key, segments, window=2) is query
        assert given["window_size"] == (1, 0) and given.get("enable_gqa") is asked
