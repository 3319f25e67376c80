"""vLLM's own GPU worker and second model runner, in a process whose GPU is pretended: `vllm_rank.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from third_party_patches.torch.fake_cuda import build

SCRIPT = Path(__file__).with_name("vllm_rank.py")
REPOSITORY = Path(__file__).parents[2]
EAGER = "actor_rollout_ref.rollout.enforce_eager=true"
RANKS = {
    "configs/llama3_70b_ppo.yaml": 20,
    "configs/recipes/qwen2.5_7b_grpo.yaml": 7,
    "configs/recipes/qwen3_30b_a3b_grpo.yaml": 1,
}
"""A recipe and a rank of it, which is not the first of its TP group."""

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("pretended"))


def run(library, recipe, rank, folder, *options):
    command = [sys.executable, str(SCRIPT), str(library), recipe, str(rank), str(folder), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, SCRIPT.parent)))}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("recipe", "rank"), list(RANKS.items()))
def test_an_engine_is_built_and_draws(library, tmp_path, recipe, rank):
    """Names, shapes and dtypes of our shards are those of vLLM's model on CUDA; it profiles within the planned memory,
    allocates its cache and draws three tokens for each of two requests, with one wait a step.

    Would not catch what a kernel computes, nor the memory inside of attention and experts.
    """
    answer = run(library, recipe, rank, tmp_path, EAGER)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = json.loads((tmp_path / "engine.json").read_text())
    assert (found["worker"], found["runner"]) == ("StableWorker", "vllm.v1.worker.gpu.model_runner")
    assert found["backends"] == ["FLASH_ATTN"] and found["is_bound"]
    assert found["drawn"] == {"0": 3, "1": 3} and found["num_steps"] == 3
    assert 0 < found["held"] < found["profiled"] < found["planned"]
    assert sum(count for text, count in found["waits"]["slice"].items() if text.startswith("event")) == 3
    # Where its second runner is not the one that runs, none of these is launched.
    assert {"_gumbel_sample_kernel", "_topk_topp_kernel", "_post_update_kernel"} <= set(found["called"])
    assert {"_C::rms_norm", "_C::fused_add_rms_norm", "_C::rotary_embedding"} <= set(found["called"])


def test_where_it_ends(library, tmp_path):
    """Captured graphs need vLLM's compiler, whose passes look up compiled operators. Would not catch a later end."""
    answer = run(library, "configs/recipes/qwen2.5_7b_grpo.yaml", 7, tmp_path)
    assert answer.returncode == 1
    assert "vllm/compilation/passes/fusion/matcher_utils.py" in answer.stderr
    assert "'_C' object has no attribute 'rotary_embedding'" in answer.stderr
