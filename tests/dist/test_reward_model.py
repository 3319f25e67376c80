"""The reward model's score of a sequence is the classifier's of transformers, in every layout."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny_models import random_batch, run_config, save_llama, save_reward_model

from megatron_rl.records import Batch, ragged, single_turn

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

# A pass of 25 tokens at most: the longest sequence and one more.
DYNAMIC = {"reward_model__use_dynamic_bsz": True, "reward_model__forward_max_token_len_per_gpu": 24}
DYNAMIC |= {"data__max_prompt_length": 12, "data__max_response_length": 12}
LAYOUTS = {
    "TP2": (2, 2, 1, {"actor_rollout_ref__actor__megatron__sequence_parallel": True}),
    "PP2": (2, 1, 2, {}),
    "DP2 dynamic": (2, 1, 1, DYNAMIC),
}


def sequences() -> Batch:
    """Seven answers to seven prompts, and a prompt without an answer."""
    rows = random_batch(7)
    lengths = torch.cat([rows.num_sampled, torch.tensor([0])])
    return single_turn(ragged([*rows["input_ids"].unbind(), torch.tensor([9, 8, 7])]), lengths)


def scores(config) -> tuple[int, torch.Tensor] | None:
    """(data-parallel rank, scores of its share) on its collector, after the model has rested and come back."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("reward_model")
    [offloaded] = worker.roles["reward_model"].offloadable()
    offloaded.offload()
    assert not any(tensor.untyped_storage().nbytes() for tensor in worker.roles["reward_model"].pipeline.parameters())
    offloaded.reload()
    where = worker.coordinates()
    mine = sequences()[torch.arange(8).tensor_split(where.dp_size)[where.dp_rank]]
    record = worker.roles["reward_model"].scores(mine)
    return (where.dp_rank, record["scores"]) if where.dp_collector else None


@torch.no_grad()
def classifier_scores(folder: str) -> torch.Tensor:
    """All rows at once, padded on the right with the token that the classifier knows as padding."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = sequences()["input_ids"].unbind()
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return model(padded, attention_mask=mask).logits[:, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_equal_the_classifiers(layout, tmp_path) -> None:
    """Within 1e-5, in micro-batches of 3. Would not catch a chat template that the model was not trained on."""
    path = save_reward_model(tmp_path, "Llama")
    world_size, tp_size, pp_size, options = LAYOUTS[layout]
    keys = options | {"reward_model__enable": True, "reward_model__model__path": path}
    keys |= {"reward_model__micro_batch_size_per_gpu": 3, "reward_model__megatron__param_offload": True}
    config = run_config(path, tp_size, pp_size, **keys)
    answers = [answer for answer in run_ranks(world_size, scores, config) if answer is not None]
    found = torch.cat([share for _, share in sorted(answers, key=lambda answer: answer[0])])
    expected = classifier_scores(path)
    assert (found - expected).abs().max() < 1e-5
    assert expected.std() > 0.01


def refusal(config) -> str:
    """What building says."""
    from megatron_rl.errors import ConfigError
    from megatron_rl.roles.host import RankHost

    try:
        RankHost(config).build("reward_model")
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_a_language_model_is_refused(tmp_path) -> None:
    """Instead of a head that is drawn, which a critic has. Preflight says so before."""
    path = save_llama(tmp_path)
    config = run_config(path, 1, 1, reward_model__enable=True, reward_model__model__path=path)
    [said] = run_ranks(1, refusal, config)
    assert "has no head that gives a score" in said
