"""Reward models and critics that start from one: scores and values are those of transformers' classifier."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from folder_observations import NUM_ROWS, assert_same_tensors
from layout_keys import of_actor
from ranks import run_ranks
from safetensors.torch import load_file
from scenarios import Runs, Scenario
from tiny_models import random_batch, run_config

from megatron_rl.columns import CRITIC_UPDATE, SCORING
from megatron_rl.records import Batch, ragged, single_turn


@dataclass(frozen=True)
class Scores:
    """A reward model's scores are the classifier's within 1e-5, in micro-batches of 3.

    Would not catch a chat template that the model was not trained on.
    """

    name: str = "scores"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path, (num_ranks, *sizes) = runs.path(scenario), scenario.ranks
        keys = {**scenario.keys, **of_actor(scenario.sizes), "reward_model__enable": True}
        keys |= {"reward_model__model__path": path, "reward_model__megatron__param_offload": True}
        keys["reward_model__micro_batch_size_per_gpu"] = 3
        ranks = run_ranks(num_ranks, scores, run_config(path, *sizes, **keys))
        answers = sorted((answer for answer in ranks if answer is not None), key=lambda answer: answer[0])
        expected = runs.once(("classifier", path), partial(classifier_scores, path))
        assert (torch.cat([share for _, share in answers]) - expected).abs().max() < 1e-5
        assert expected.std() > 0.01


def sequences() -> Batch:
    """Seven answers to seven prompts, and a prompt without an answer."""
    rows = random_batch(NUM_ROWS)
    lengths = torch.cat([rows.num_sampled, torch.tensor([0])])
    return single_turn(ragged([*rows["input_ids"].unbind(), torch.tensor([9, 8, 7])]), lengths)


def scores(config) -> tuple[int, torch.Tensor] | None:
    """(data-parallel rank, scores of its share) on its collector, after the model has rested and come back."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("reward_model")
    [offloaded] = worker.roles["reward_model"].offloadable()
    offloaded.offload()
    weights = worker.roles["reward_model"].model.pipeline.parameters()
    assert not any(tensor.untyped_storage().nbytes() for tensor in weights)
    offloaded.reload()
    where = worker.coordinates()
    mine = sequences()[torch.arange(NUM_ROWS + 1).tensor_split(where.dp_size)[where.dp_rank]]
    record = worker.roles["reward_model"].scores(mine)
    return (where.dp_rank, record["scores"]) if where.dp_collector else None


def classifier(folder: Path | str) -> torch.nn.Module:
    """Transformers' model of a folder, which has one score."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.num_labels == 1
    return model


@torch.no_grad()
def classifier_scores(folder: str) -> torch.Tensor:
    """All rows at once, padded on the right with the token that the classifier knows as padding."""
    model, rows = classifier(folder), sequences()["input_ids"].unbind()
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return model(padded, attention_mask=mask).logits[:, 0]


@dataclass(frozen=True)
class Values:
    """A critic's values are the reward model's scores of prefixes within 2e-5, before an update and after, in the
    folder that it writes; the untouched folder has the bytes of the reward model's. On a language model's trunk the
    drawn head goes out with it.

    Would not catch what the trainer never reads, nor a head that is drawn differently in another layout.
    """

    is_drawn: bool = False
    """Whether the model has no head of its own."""
    name: str = "values"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path, (num_ranks, *sizes) = runs.path(scenario), scenario.ranks
        keys = of_actor(scenario.sizes) | ({} if self.is_drawn else {"critic__model__path": path})
        config = run_config(path, *sizes, critic__optim__lr=1e-2, **keys)
        answers = [one for one in run_ranks(num_ranks, values_and_export, config, folder) if one is not None]
        untouched = hugging_face_values(folder / "untouched" if self.is_drawn else path)
        trained = hugging_face_values(folder / "trained")
        assert answers and (trained - untouched).abs().max() > 1e-3
        for before, after in answers:
            assert (before - untouched).abs().max() < 2e-5
            assert (after - trained).abs().max() < 2e-5
        if not self.is_drawn:
            assert_same_tensors(load_file(folder / "untouched/model.safetensors"), Path(path))


def values_and_export(config, folder: Path) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values of the untouched critic, then of the trained one; both are exported."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("critic")
    critic, experience = worker.roles["critic"], random_batch(NUM_ROWS)
    before = critic.values(experience.read_by(SCORING))
    critic.export_hf(folder / "untouched")
    critic.update(experience.read_by(CRITIC_UPDATE))
    after = critic.values(experience.read_by(SCORING))
    critic.export_hf(folder / "trained")
    return None if before is None else (before.flat("old_values"), after.flat("old_values"))


@torch.no_grad()
def hugging_face_values(folder: Path | str) -> torch.Tensor:
    """The reward model's score of every prefix that a response token follows: hidden state @ score.weight."""
    model, rows, values = classifier(folder), random_batch(NUM_ROWS), []
    for ids, length in zip(rows["input_ids"].unbind(), rows.num_sampled.tolist(), strict=True):
        hidden = model.base_model(ids[None]).last_hidden_state
        values.append(model.score(hidden)[0, len(ids) - length - 1 : -1, 0])
        # The same number as the classifier's own answer, which is the score of the last token.
        assert torch.allclose(model(ids[None]).logits[0], model.score(hidden)[0, -1], atol=1e-6)
    return torch.cat(values)
