"""What preflight accepts and refuses of reward models that read text with a tokenizer of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_folders import problems, write_model

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.roles import roles_of
from megatron_rl.planning.folder_files import different_tokens

REWARD = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
GROUP = "reward_model"
TEXT = f"{GROUP}.model.input_tokenizer"
# The actor's folder has tokens a and b; that of the reward model calls a number 1.
TOKENS, OTHERS = {"a": 0, "b": 1}, {"b": 0, "a": 1}


@pytest.fixture
def reading(config, tmp_path):
    """A reward model of another vocabulary that reads text; sequences of 16 + 48 tokens."""
    reward = config.reward_model
    reward.enable, reward.model.path = True, write_model(tmp_path / "reward", **REWARD, vocab_size=70)
    reward.model.input_tokenizer = config.actor_rollout_ref.model.path
    for folder, tokens in (("model", TOKENS), ("reward", OTHERS)):
        (tmp_path / folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    return config


def score_pass(config):
    return next(role.score for role in roles_of(config) if role.name == GROUP)


def test_another_vocabulary_is_read_as_text(reading, tmp_path):
    """With the key it passes, without it both differences are refused and the key is what is offered.

    Would not catch a tokenizer whose file is not tokenizer.json.
    """
    actor = str(tmp_path / "model")
    assert problems(reading) == []
    reading.reward_model.model.input_tokenizer = None
    tokens, size = problems(reading)
    assert "must have the actor's tokens, or read text: 2 of 2 have other ids" in tokens
    assert "so their vocab_size must be equal: 100 of" in size
    assert all(problem.endswith(f"try: {TEXT}={actor}") for problem in (tokens, size))


@pytest.mark.parametrize(("num_rows", "is_said"), [(60, False), (61, False), (59, True)])
def test_a_model_must_have_a_row_for_each_token(tmp_path, num_rows, is_said):
    """Of a reward model or teacher with the actor's tokenizer.json, whose last token is 59. Would not catch a tokenizer
    of other files.
    """
    folders = write_model(tmp_path / "actor"), write_model(tmp_path / "other", vocab_size=num_rows)
    for folder in folders:
        (Path(folder) / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 59}}}))
    said = list(different_tokens(*map(ModelFolder, folders)))
    assert len(said) == is_said
    assert all("has 60 tokens, and vocab_size of its config.json is 59" in sentence for sentence in said)


def test_the_folder_of_the_actors_tokenizer(reading, tmp_path):
    """Absent, without a tokenizer, with another one. Would not catch a chat template there, which nobody reads."""
    actor = str(tmp_path / "model")
    reading.reward_model.model.input_tokenizer = str(tmp_path / "modle")
    (problem,) = problems(reading)
    assert problem.startswith(
        f"{TEXT}={tmp_path}/modle must be the folder of the actor's tokenizer, and it does not exist"
    )
    assert problem.endswith(f"try: {actor}")
    reading.reward_model.model.input_tokenizer = str(tmp_path / "rewart")
    (problem,) = problems(reading)
    assert problem.endswith(f"try: {actor}; or did you mean: {tmp_path / 'reward'}")
    Path(actor, "chat_template.jinja").symlink_to("/dev/zero")
    reading.reward_model.model.input_tokenizer = actor
    assert f"{TEXT}={actor} must hold files that can be read: chat_template.jinja" in problems(reading)[-1]
    Path(actor, "chat_template.jinja").unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    reading.reward_model.model.input_tokenizer = str(empty)
    (problem,) = problems(reading)
    assert "must hold the actor's tokenizer (tokenizer.json, tokenizer.model, vocab.json); it holds nothing" in problem
    reading.reward_model.model.input_tokenizer = reading.reward_model.model.path
    (problem,) = problems(reading)
    assert "must hold the actor's tokenizer: 2 of 2 have other ids" in problem and problem.endswith(actor)


def test_the_reward_models_folder_must_have_a_tokenizer(reading, tmp_path):
    """Would not catch one that cannot be loaded; the start of the run does, before any process."""
    (tmp_path / "reward" / "tokenizer.json").unlink()
    (problem,) = problems(reading)
    assert problem.startswith("reward_model.model.path=") and "must hold a tokenizer" in problem


def test_a_tokenizer_that_is_too_deep_is_refused_once(reading, tmp_path):
    """By the rule for its folder's files. Would not catch one that only the library finds too deep."""
    reading.reward_model.model.input_tokenizer = None
    (tmp_path / "reward" / "tokenizer.json").write_text("[" * 100_000)
    assert ["tokenizer.json is not valid JSON" in problem for problem in problems(reading)].count(True) == 1


def test_lengths_are_the_reward_models_own(reading, tmp_path):
    """A short model beside long sequences, and the other way round. Would not catch a model trained on less."""
    write_model(tmp_path / "reward", **REWARD, vocab_size=70, max_position_embeddings=50)
    assert problems(reading) == [
        f"{GROUP}.max_length=null must be <= max_position_embeddings(50) of {tmp_path}/reward; null is "
        "data.max_prompt_length + data.max_response_length = 64; try: 50"
    ]
    reading.reward_model.max_length = 50
    assert problems(reading) == [] and score_pass(reading).longest == 50
    reading.reward_model.max_length = 51
    (problem,) = problems(reading)
    assert problem.startswith(f"{GROUP}.max_length=51 must be <= max_position_embeddings(50)")
    write_model(tmp_path / "reward", **REWARD, vocab_size=70, max_position_embeddings=128)
    reading.reward_model.max_length = 128
    assert problems(reading) == []


def test_passes_have_room_for_the_longest(reading, tmp_path):
    """Dynamic passes of 100 tokens, conversations of 128. Would not catch a pass that is too large for memory."""
    write_model(tmp_path / "reward", **REWARD, vocab_size=70, max_position_embeddings=128)
    reward = reading.reward_model
    reward.use_dynamic_bsz, reward.forward_max_token_len_per_gpu, reward.max_length = True, 100, 128
    assert problems(reading) == [
        f"{GROUP}.forward_max_token_len_per_gpu=100 must be >= {GROUP}.max_length = 128; try: 128"
    ]
    reward.forward_max_token_len_per_gpu = 128
    assert problems(reading) == []
    assert (score_pass(reading).max_tokens, score_pass(reading).extra_tokens) == (129, 1)
    reward.model.input_tokenizer = reward.max_length = None
    assert score_pass(reading).longest is None


def test_a_critic_from_the_same_folder_still_reads_tokens(reading):
    """Would not catch a critic whose vocabulary only has the actor's size."""
    reading.critic.model.path = reading.reward_model.model.path
    (problem,) = problems(reading)
    assert problem.startswith("critic.model.path=") and "vocab_size must be equal" in problem


def test_a_limit_without_text_is_refused(config, tmp_path):
    """Would not catch a limit that is never reached."""
    config.reward_model.enable, config.reward_model.model.path = True, write_model(tmp_path / "reward", **REWARD)
    config.reward_model.max_length = 40
    (problem,) = problems(config)
    assert problem.startswith(f"{GROUP}.max_length=40 is of no use without {TEXT}") and problem.endswith("try: null")
