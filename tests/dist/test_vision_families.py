"""The language models of folders that also read images: trained, served and exported, and the whole comes back.

Logits, answers and the untouched folder are compared as in `folder_observations.py`. An update is compared with
transformers on the exported folder, so that a vision tower that is lost or moved is noticed. Why plain rotary positions
are right: the sections of an embedding are for three places, which are equal in text.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from folder_observations import NUM_ROWS, rows_of
from folder_rows import LAYOUTS
from ranks import run_ranks
from raw_tensors import raw
from resumed_training import start_saving
from reward_observations import hugging_face_values
from rollout_checks import GREEDY, hugging_face_greedy, logprob_difference, round_trip, tokens
from sweeps import WEEKLY, marks_of
from tiny_models import random_batch, run_config
from tiny_vision import (
    PROCESSORS,
    save_gemma3_vision,
    save_qwen3_5_vision,
    save_qwen3_vl,
    save_qwen25_vl,
    save_qwen25_vl_as_published,
)

from megatron_rl.checkpoint.export_saved import export_saved
from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE, SCORING
from megatron_rl.controller.lifecycle import copy_model_files
from megatron_rl.controller.report import hf_model, hf_sampled_logits

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

OFTEN = ((save_qwen3_vl, "TP2"),)
SWEPT = ((save_gemma3_vision, "TP2xPP2"), (save_qwen25_vl_as_published, "TP2"))
FURTHER = tuple((save, "TP2xPP2") for save in (save_qwen25_vl, save_qwen3_vl, save_qwen3_5_vision))
FURTHER += ((save_gemma3_vision, "one process"),)
"""What runs once a week, with the further critics below: the same folders, cut otherwise."""
CASES = [
    pytest.param(*case, marks=marks_of(case, OFTEN, FURTHER), id=f"{case[0].__name__}-{case[1]}")
    for case in (*OFTEN, *SWEPT, *FURTHER)
]
RATE = {"actor_rollout_ref__actor__optim__lr": 1e-3}


def before_and_after_an_update(config, folder: Path) -> dict:
    """What one rank knows of an untouched model, and of one that took a step; both are exported, the latter saved."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    actor = worker.roles["actor"]
    first, _ = round_trip(worker, GREEDY)
    rows = random_batch(NUM_ROWS)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    known = {"greedy": tokens(first), "difference": logprob_difference(worker, first), "dp_rank": worker.groups.dp_rank}
    known["logits"] = actor.sampled_logits(rows.read_by(SCORING))
    actor.export_hf(folder / "untouched", max_shard_bytes=400_000)
    rows.add(old_log_probs=rows["advantages"].clone())
    actor.update(rows.read_by(ACTOR_UPDATE))
    second, _ = round_trip(worker, GREEDY)
    known |= {"greedy after": tokens(second), "difference after": logprob_difference(worker, second)}
    known["logits after"] = actor.sampled_logits(rows.read_by(SCORING))
    actor.export_hf(folder / "trained", max_shard_bytes=400_000)
    start_saving(worker, folder / "saved").finish(wait=True)
    return known


@pytest.mark.parametrize(("save", "layout"), CASES)
def test_a_language_model_is_trained_inside_a_larger_one(save, layout, tmp_path) -> None:
    """Logits within 2e-5, tokens equal, log-probs within 5e-5, before and after an update; bytes and files of the whole
    folder. Would not catch what only images show.
    """
    path = Path(save(tmp_path / "model"))
    (world_size, tp_size, pp_size), _ = LAYOUTS[layout]
    config = run_config(
        str(path), tp_size, pp_size, **RATE, actor_rollout_ref__rollout__tensor_model_parallel_size=tp_size
    )
    ranks = run_ranks(world_size, before_and_after_an_update, config, tmp_path)
    batch, dp_size = random_batch(NUM_ROWS).read_by(SCORING), world_size // (tp_size * pp_size)
    expected = {
        after: hf_sampled_logits(folder, batch) for after, folder in (("", path), (" after", tmp_path / "trained"))
    }
    for after, folder in (("", path), (" after", tmp_path / "trained")):
        greedy = hugging_face_greedy(str(folder))
        assert all(rank[f"greedy{after}"] == greedy for rank in ranks)
        scored = [rank for rank in ranks if rank[f"logits{after}"] is not None]
        assert len(scored) == world_size // pp_size
        for rank in scored:
            wanted = rows_of(expected[after], rank["dp_rank"], dp_size)
            assert (rank[f"logits{after}"] - wanted).abs().max() < 2e-5
        differences = [rank[f"difference{after}"] for rank in ranks if rank[f"difference{after}"] is not None]
        assert differences and max(differences) < 5e-5
    assert (expected[""] - expected[" after"]).abs().max() > 1e-2

    original, untouched, trained = raw(path), raw(tmp_path / "untouched"), raw(tmp_path / "trained")
    assert untouched == original and trained.keys() == original.keys()
    vision = {name for name, (dtype, _) in original.items() if dtype == torch.bfloat16}
    assert len(vision) > 10 and all(trained[name] == original[name] for name in vision)
    for folder in (tmp_path / "untouched", tmp_path / "trained"):
        for name in ("config.json", "tokenizer.json", *PROCESSORS):
            assert (folder / name).read_bytes() == (path / name).read_bytes(), name
    whole = hf_model(tmp_path / "trained")
    assert type(whole).__name__ == json.loads((path / "config.json").read_text())["architectures"][0]

    copy_model_files({"actor": str(path)}, tmp_path / "saved")
    export_saved(tmp_path / "saved", "actor", tmp_path / "offline")
    assert raw(tmp_path / "offline") == trained
    for name in ("config.json", "tokenizer.json", *PROCESSORS):
        assert (tmp_path / "offline" / name).read_bytes() == (path / name).read_bytes(), name
    assert not (tmp_path / "offline" / "carried.json").exists()


def train_critic(config, folder: Path) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values of the untouched critic, then of the trained one; both are exported, the latter saved."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("critic")
    critic, rows = worker.roles["critic"], random_batch(NUM_ROWS)
    before = critic.values(rows.read_by(SCORING))
    critic.export_hf(folder / "untouched")
    critic.update(rows.read_by(CRITIC_UPDATE))
    after = critic.values(rows.read_by(SCORING))
    critic.export_hf(folder / "trained")
    start_saving(worker, folder / "saved").finish(wait=True)
    return None if before is None else (before.flat("old_values"), after.flat("old_values"))


@pytest.mark.parametrize(
    ("save", "architecture"),
    [
        (save_qwen3_vl, "Qwen3ForSequenceClassification"),
        pytest.param(save_qwen25_vl, "Qwen2ForSequenceClassification", marks=WEEKLY),
        pytest.param(save_gemma3_vision, "Gemma3TextForSequenceClassification", marks=WEEKLY),
    ],
)
def test_a_critic_is_written_as_a_classifier_of_text(save, architecture, tmp_path) -> None:
    """Its values are transformers' within 2e-5, and it carries nothing; of a checkpoint, too. Would not catch a head
    that is drawn differently in another layout.
    """
    path = save(tmp_path / "model")
    ranks = run_ranks(2, train_critic, run_config(path, 1, 2, critic__optim__lr=1e-2), tmp_path)
    answers = [answer for answer in ranks if answer is not None]
    assert answers
    for before, after in answers:
        assert (before - hugging_face_values(tmp_path / "untouched")).abs().max() < 2e-5
        assert (after - hugging_face_values(tmp_path / "trained")).abs().max() < 2e-5
        assert (after - before).abs().max() > 1e-3
    settings = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert settings["architectures"] == [architecture] and "vision_config" not in settings
    exported = raw(tmp_path / "trained")
    assert {name.split(".")[0] for name in exported} == {"model", "score"}
    copy_model_files({"critic": path}, tmp_path / "saved")
    export_saved(tmp_path / "saved", "critic", tmp_path / "offline")
    assert raw(tmp_path / "offline") == exported
