"""A critic that starts from a reward model's folder gives that model's scores, and can be written as such a folder.

Both layouts are compared with transformers; one of them has stages, TP, SP and experts, the other none and is dense.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import random_batch, run_config, save_llama, save_reward_model

from megatron_rl.columns import CRITIC_UPDATE, SCORING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

NUM_ROWS = 7
LAYOUTS = {"one process": (1, 1, 1, {}), "TP2xPP2": (4, 2, 2, {"sequence_parallel": True})}


def values_and_export(config, folder: Path) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values of the untouched critic, then of the trained one; both are exported."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("critic")
    experience = random_batch(NUM_ROWS)
    scores = worker.roles["critic"].values(experience.read_by(SCORING))
    worker.roles["critic"].export_hf(folder / "untouched")
    worker.roles["critic"].update(experience.read_by(CRITIC_UPDATE))
    trained = worker.roles["critic"].values(experience.read_by(SCORING))
    worker.roles["critic"].export_hf(folder / "trained")
    return None if scores is None else (scores.flat("old_values"), trained.flat("old_values"))


@torch.no_grad()
def hugging_face_values(folder: Path) -> torch.Tensor:
    """The reward model's score of every prefix that a response token follows: hidden state @ score.weight."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.num_labels == 1
    rows = random_batch(NUM_ROWS)
    values = []
    for ids, length in zip(rows["input_ids"].unbind(), rows.num_sampled.tolist(), strict=True):
        hidden = model.base_model(ids[None]).last_hidden_state
        values.append(model.score(hidden)[0, len(ids) - length - 1 : -1, 0])
        # The same number as the classifier's own answer, which is the score of the last token.
        assert torch.allclose(model(ids[None]).logits[0], model.score(hidden)[0, -1], atol=1e-6)
    return torch.cat(values)


@pytest.mark.parametrize(("family", "layout"), [("Llama", "one process"), ("Mixtral", "TP2xPP2")])
def test_values_equal_the_reward_models_scores(family, layout, tmp_path) -> None:
    """Before and after an update, 2e-5; bytes equal when untouched. Would not catch what the trainer never reads."""
    path = save_reward_model(tmp_path / "model", family)
    world_size, tp_size, pp_size, sizes = LAYOUTS[layout]
    keys = {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in sizes.items()}
    config = run_config(path, tp_size, pp_size, critic__optim__lr=1e-2, critic__model__path=path, **keys)
    answers = [answer for answer in run_ranks(world_size, values_and_export, config, tmp_path) if answer is not None]
    untouched, trained = hugging_face_values(Path(path)), hugging_face_values(tmp_path / "trained")
    assert answers and (trained - untouched).abs().max() > 1e-3
    for before, after in answers:
        assert (before - untouched).abs().max() < 2e-5
        assert (after - trained).abs().max() < 2e-5
    original, exported = (load_file(f"{folder}/model.safetensors") for folder in (path, tmp_path / "untouched"))
    assert original.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in original.items())


def test_a_critic_on_a_language_models_trunk_is_written_as_a_reward_model(tmp_path) -> None:
    """The drawn head goes out with the trunk. Would not catch a head that is drawn differently in another layout."""
    path = save_llama(tmp_path / "model")
    config = run_config(path, 1, 1, critic__optim__lr=1e-2)
    [(before, _)] = run_ranks(1, values_and_export, config, tmp_path)
    assert (before - hugging_face_values(tmp_path / "untouched")).abs().max() < 2e-5
