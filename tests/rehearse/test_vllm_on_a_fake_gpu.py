"""vLLM's own GPU worker and second model runner, in a process whose GPU is pretended: `vllm_rank.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_rows import OFTEN, ROWS, write_folder
from sweeps import often

from megatron_rl.model.families import FAMILIES
from third_party_patches.torch.fake_cuda import build

SCRIPT = Path(__file__).with_name("vllm_rank.py")
REPOSITORY = Path(__file__).parents[2]
EAGER = "actor_rollout_ref.rollout.enforce_eager=true"
DENSE = "configs/recipes/qwen2.5_7b_grpo.yaml"
RANKS = {
    "configs/llama3_70b_ppo.yaml": 20,
    "configs/recipes/deepseek_v3_grpo.yaml": 21,
    "configs/recipes/kimi_k2_grpo.yaml": 64,
    DENSE: 7,
    "configs/recipes/gpt_oss_20b_grpo.yaml": 1,
    "configs/recipes/llama3_70b_lora_grpo.yaml": 3,
    "configs/recipes/qwen2.5_7b_lora_grpo.yaml": 0,
    "configs/recipes/qwen3.5_35b_a3b_grpo.yaml": 1,
    "configs/recipes/qwen3_30b_a3b_grpo.yaml": 1,
}
"""A recipe and a rank of it, which is not the first of its TP group where there is another."""
CAPTURED = (
    "configs/recipes/qwen2.5_7b_lora_grpo.yaml",
    "configs/recipes/gpt_oss_20b_grpo.yaml",
    "configs/recipes/qwen3.5_35b_a3b_grpo.yaml",
)
"""With adapters, with sinks and experts, with the gated delta rule; further recipes are weekly."""
WITH_ADAPTERS = CAPTURED[0]
ROLLOUT, LORA = "actor_rollout_ref.rollout", "actor_rollout_ref.model.lora"
CHANGES = (
    f"{LORA}.alpha=128",
    f"{LORA}.rank=64",
    f"{LORA}.target_modules=[linear_qkv]",
    f"{ROLLOUT}.max_num_batched_tokens=4096",
    f"{ROLLOUT}.kv_cache_memory_bytes=12000000000",
    f"{ROLLOUT}.disable_custom_all_reduce=false",
    f"{ROLLOUT}.temperature=0.7",
    "data.max_response_length=1024",
    "trainer.n_gpus_per_node=2",
)
"""Keys that reach an engine, or its tensors. The first is in the sweeps, the others are weekly."""
FEW = "actor_rollout_ref.rollout.max_num_seqs=8"
"""Captured at four sizes."""

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("pretended"))


def run(library, recipe, rank, folder, *options):
    command = [sys.executable, str(SCRIPT), str(library), recipe, str(rank), str(folder), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, SCRIPT.parent)))}
    environment.pop("TORCHDYNAMO_DISABLE", None)  # of a rank on a CPU that another test was
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def drawn_by(library, recipe, rank, folder, *options):
    """Reports of an engine that was built and drew, with one wait a step."""
    answer = run(library, recipe, rank, folder, *options)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = json.loads((folder / "engine.json").read_text())
    assert (found["worker"], found["runner"]) == ("StableWorker", "vllm.v1.worker.gpu.model_runner")
    assert found["is_bound"]
    # The first group of a replica with attention DP has one of two prompts.
    assert found["drawn"] == {"0": 3} | ({} if "kimi" in recipe else {"1": 3}) and found["num_steps"] == 3
    assert sum(count for text, count in found["waits"]["slice"].items() if text.startswith("event")) == 3
    # Where its second runner is not the one that runs, none of these is launched.
    assert {"_gumbel_sample_kernel", "_topk_topp_kernel", "_post_update_kernel"} <= set(found["called"])
    return found


@pytest.mark.parametrize(("recipe", "rank"), list(RANKS.items()))
def test_an_engine_is_built_and_draws(library, tmp_path, recipe, rank):
    """Names, shapes and dtypes of our shards, and of adapters, are those of vLLM's model on CUDA; it profiles within
    the planned memory, allocates its cache and draws three tokens for each of two requests, with one wait a step.

    Would not catch results of kernels, nor the memory inside of attention and experts.
    """
    found = drawn_by(library, recipe, rank, tmp_path, EAGER)
    assert 0 < found["held"] < found["profiled"] < found["planned"]
    assert found["backends"] == [
        ROWS["DeepseekV3ForCausalLM"].backend if any(name in recipe for name in ("deepseek", "kimi")) else "FLASH_ATTN"
    ]
    assert ("vllm::lora_shrink" in found["called"]) == ("lora" in recipe)


@pytest.mark.parametrize("architecture", often(ROWS, (), set(ROWS) - set(OFTEN)))
def test_an_engine_of_each_family(library, tmp_path, architecture):
    """The same of every family at published sizes, with the attention that vLLM chooses for it on a Hopper GPU.

    Would not catch a family whose published config.json differs from transformers' defaults and the row's changes.
    """
    model = write_folder(architecture, tmp_path / "model")
    found = drawn_by(library, DENSE, 1, tmp_path, EAGER, f"actor_rollout_ref.model.path={model}")
    assert 0 < found["held"] < found["profiled"] < found["planned"]
    assert found["backends"] == [ROWS[architecture].backend]


def test_every_family_has_a_row():
    """Would not catch a kind of layer that no default has."""
    assert set(ROWS) == set(FAMILIES)


@pytest.mark.parametrize("recipe", often(RANKS, (), set(RANKS) - set(CAPTURED)))
def test_an_engine_with_captured_graphs(library, tmp_path, recipe):
    """Dynamo traces the model whole, vLLM cuts the graph and captures it at every size, piece by piece and whole, with
    nothing in it that CUDA refuses; the drawn tokens come from replays.

    Would not catch what inductor makes of the pieces, whose memory is therefore not that of a GPU.
    """
    found = drawn_by(library, recipe, RANKS[recipe], tmp_path, FEW)
    assert found["graphs"]["captured"] > found["graphs"]["replayed"] > 0


@pytest.fixture(scope="module")
def traced(library, tmp_path_factory):
    """Overrides -> key and code of an engine with adapters; each is traced once, and all of one
    folder, whose path is a part of the key.
    """
    folder, found = tmp_path_factory.mktemp("traced"), {}

    def trace(*overrides):
        if overrides not in found:
            answer = run(library, WITH_ADAPTERS, 0, folder, "--trace", FEW, *overrides)
            assert answer.returncode == 0, answer.stdout + answer.stderr
            found[overrides] = json.loads((folder / "engine.json").read_text())
        return found[overrides]

    return trace


@pytest.mark.parametrize("change", often(CHANGES, (), set(CHANGES) - set(CHANGES[:1])))
def test_other_code_has_another_key(traced, change):
    """A Python constant of the traced graph changes with a key only if the folder does from which vLLM would load the
    code. Adapters' alpha was such a constant, and a second run generated with the first one's.

    Would not catch a constant inside of an operator, or a key that changes no constant alone.
    """
    one, other = traced(), traced(change)
    assert one["code"] and other["code"]
    assert one["code"] == other["code"] or one["key"] != other["key"]
