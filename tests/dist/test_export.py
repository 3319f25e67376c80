"""A model that goes in and comes out of a TP2xPP2 job is the same model; a trained one gives the trainer's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import random_experience, run_config, save_llama, save_qwen2, save_qwen3, save_qwen3_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

NUM_ROWS = 7
MEGATRON = "actor_rollout_ref__actor__megatron__"
SP = {f"{MEGATRON}sequence_parallel": True}
EP2 = {f"{MEGATRON}expert_model_parallel_size": 2, f"{MEGATRON}expert_tensor_parallel_size": 1}


def export_before_and_after_update(config, folder: Path) -> torch.Tensor | None:
    """Export untouched, train one step, export again; the trainer's logits at the end."""
    from megatron_rl.workers.rank_worker import RankWorker

    worker = RankWorker(config)
    worker.build_actor()
    worker.export_hf(folder / "untouched")
    experience = random_experience(NUM_ROWS)
    experience.old_log_probs = experience.advantages
    worker.update_actor(experience.actor_batch())
    worker.export_hf(folder / "trained")
    return worker.response_logits(experience.sequences())


@pytest.mark.parametrize(
    ("save_model", "sizes"),
    [(save_qwen2, {}), (save_llama, {}), (save_qwen3, SP), (save_qwen3_moe, SP), (save_qwen3_moe, SP | EP2)],
    ids=["qwen2", "llama", "qwen3", "qwen3-moe ETP2", "qwen3-moe EP2"],
)
def test_export(save_model, sizes, tmp_path) -> None:
    """Byte-identical when untouched, 1e-4 in logits when trained; would not catch a wrong tokenizer (none here)."""
    from megatron_rl.report import hf_response_logits

    path = save_model(tmp_path / "model")
    save_test_tokenizer(Path(path))
    results = run_ranks(4, export_before_and_after_update, run_config(path, 2, 2, **sizes), tmp_path)
    original, untouched = load_file(f"{path}/model.safetensors"), load_file(tmp_path / "untouched/model.safetensors")
    assert original.keys() == untouched.keys()
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in original.items())

    trainer_logits = next(logits for logits in results if logits is not None)
    sequences = random_experience(NUM_ROWS).sequences()
    trained = hf_response_logits(tmp_path / "trained", sequences)
    assert (trained - trainer_logits).abs().max() < 1e-4
    assert (hf_response_logits(Path(path), sequences) - trainer_logits).abs().max() > 1e-4
    assert not list(tmp_path.glob("*.unfinished"))


def save_test_tokenizer(folder: Path) -> None:
    """The exporter copies the source's tokenizer, so the source needs one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(33 + i): i for i in range(70)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="!").save_pretrained(folder)
