"""An exported folder is one that vLLM reads by itself. That exports are the trainer's model, `tests/parity` has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from rollout_checks import EOS, GREEDY, hugging_face_greedy, prompts
from tiny_models import run_config, save_mixtral
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]


def export_in_small_files(config, target: Path) -> None:
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.roles["actor"].export_hf(target, max_shard_bytes=300_000)


def vllm_greedy(folder: str) -> list[list[int]]:
    """What vLLM answers with weights that it has read itself."""
    from vllm import LLM, SamplingParams

    from megatron_rl.rollout.engine import inspect_in_process

    inspect_in_process("MixtralForCausalLM")
    llm = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=224,
        kv_cache_memory_bytes=16 << 20,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=GREEDY.max_tokens, stop_token_ids=[EOS], ignore_eos=True, detokenize=False
    )
    requests = [{"prompt_token_ids": row.tolist()} for row in prompts()["input_ids"].unbind()]
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(requests, params, use_tqdm=False)]


def test_vllm_reads_what_a_float32_run_of_a_bfloat16_folder_writes(tmp_path) -> None:
    """Experts in many files, float32 for transformers. Would not catch a family that vLLM names otherwise."""
    path = save_mixtral(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    target = tmp_path / "exported"
    run_ranks(1, export_in_small_files, run_config(path, 1, 1), target)
    assert len(list(target.glob("*.safetensors"))) > 3
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.float32
    assert run_ranks(1, vllm_greedy, str(target)) == [hugging_face_greedy(path)]
