"""A trained model that comes out of a pipelined job gives the trainer's logits, in whatever stages it was trained.

That an untouched one comes out as it went in, `test_families_end_to_end.py` checks for every family.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from rollout_checks import EOS, GREEDY, hugging_face_greedy, prompts
from safetensors.torch import load_file
from sweeps import WEEKLY
from tiny_gpt_oss import save_gpt_oss
from tiny_minimax import save_minimax
from tiny_models import random_batch, run_config, save_llama, save_mixtral, save_qwen2, save_qwen3_moe
from transformers import AutoModelForCausalLM

from megatron_rl.columns import ACTOR_UPDATE, SCORING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

NUM_ROWS = 7
SP = {"sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


def export_before_and_after_update(config, folder: Path) -> torch.Tensor | None:
    """Export untouched, train one step, export again; the trainer's logits at the end."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.roles["actor"].export_hf(folder / "untouched")
    experience = random_batch(NUM_ROWS)
    experience.add(old_log_probs=experience["advantages"])
    worker.roles["actor"].update(experience.read_by(ACTOR_UPDATE))
    worker.roles["actor"].export_hf(folder / "trained")
    return worker.roles["actor"].sampled_logits(experience.read_by(SCORING))


@pytest.mark.parametrize(
    ("save_model", "world_size", "tp_size", "keys"),
    [
        (save_qwen2, 2, 1, {"virtual_pipeline_model_parallel_size": 2}),
        pytest.param(save_llama, 2, 1, {"num_layers_in_first_pipeline_stage": 1}, marks=pytest.mark.exhaustive),
        (save_qwen3_moe, 4, 2, SP | EP2),
        pytest.param(save_gpt_oss, 4, 2, SP, marks=pytest.mark.exhaustive),
        pytest.param(save_minimax, 4, 2, SP | EP2, marks=WEEKLY),
    ],
    ids=["tied in chunks", "untied with uneven stages", "EP2", "stacks", "joint norms"],
)
def test_export(save_model, world_size, tp_size, keys, tmp_path) -> None:
    """Byte-identical when untouched, 1e-4 in logits when trained; would not catch a wrong tokenizer (none here)."""
    from megatron_rl.controller.report import hf_sampled_logits, refuse_unreadable

    path = save_model(tmp_path / "model")
    keys = {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in keys.items()}
    results = run_ranks(world_size, export_before_and_after_update, run_config(path, tp_size, 2, **keys), tmp_path)
    original, untouched = load_file(f"{path}/model.safetensors"), load_file(tmp_path / "untouched/model.safetensors")
    assert original.keys() == untouched.keys()
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in original.items())
    assert not list(tmp_path.glob("*/*.index.json")), "a small model is one file"

    trainer_logits = next(logits for logits in results if logits is not None)
    sequences = random_batch(NUM_ROWS).read_by(SCORING)
    trained = hf_sampled_logits(tmp_path / "trained", sequences)
    assert (trained - trainer_logits).abs().max() < 1e-4
    assert (hf_sampled_logits(Path(path), sequences) - trainer_logits).abs().max() > 1e-4
    assert not list(tmp_path.glob("*.unfinished"))
    refuse_unreadable(tmp_path / "trained")


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
    requests = [{"prompt_token_ids": row.tolist()} for row in prompts().prompt_ids.unbind()]
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
