"""flash-linear-attention's gated delta rule: our call against its source, and its kernels against our rule.

The wheel is unpacked and not installed: make test-instruments fetches it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_torch_signatures import with_signature

from megatron_rl.model.delta_rule import chunked_delta_rule, unit_length

FLA, TRITON = (Path(sys.prefix, "contract", name) for name in ("fla", "triton"))
RULE = FLA / "fla/ops/gated_delta_rule"
REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not RULE.is_dir(), reason="make test-instruments fetches flash-linear-attention")


def test_our_call_fits_its_source() -> None:
    """Three positions and three names. Would not catch a default that changes."""
    tree = ast.parse((RULE / "chunk.py").read_text())
    (named,) = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "chunk_gated_delta_rule")
    for argument in (*named.args.args, named.args.kwarg):
        argument.annotation = None
    taken = with_signature(ast.unparse(named.args))(1, 2, 3, g=4, beta=5, use_qk_l2norm_in_kernel=True)
    assert {name: value for name, value in taken.items() if value not in (None, False, {})} == {
        **dict(zip("qkv", (1, 2, 3), strict=True)),
        "g": 4,
        "beta": 5,
        "use_qk_l2norm_in_kernel": True,
    }


def test_its_reference_is_our_rule() -> None:
    """Token by token in its plain torch, which takes keys of length 1. Would not catch a kernel that differs."""
    naive = runpy.run_path(str(RULE / "naive.py"))
    query, key, value = torch.randn(3, 2, 70, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    decay, rate = -torch.rand(2, 70, 2), torch.rand(2, 70, 2)
    theirs, _ = naive["naive_recurrent_gated_delta_rule"](unit_length(query), unit_length(key), value, rate, decay)
    assert (theirs - chunked_delta_rule(query, key, value, decay, rate)).abs().max() < 1e-5


@pytest.mark.timeout(300)
def test_its_kernels_have_our_values_and_gradients() -> None:
    """As the core of a layer, which computes all again in backward. Two heads of values on one of keys, rows that end
    inside of a chunk, in float32. Would not catch what a compiler makes of it, or 16 bits.
    """
    if not (TRITON / "triton").is_dir() and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not here: make test-instruments fetches it")
    folders = ":".join(map(str, (REPOSITORY, TRITON, FLA)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": folders}
    command = [sys.executable, str(Path(__file__).with_name("interpreted_delta_rule.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 7 and max(found.values()) < 5e-5, found
