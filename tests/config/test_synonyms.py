"""What is suggested for a key or a column that does not exist, and keys that a run reads nowhere."""

from __future__ import annotations

import other_words_table
import pytest
from marked_tables import with_tables

from megatron_rl.config.keys import KEYS
from megatron_rl.config.load import load_config, read_run
from megatron_rl.config.synonyms import ANSWERS, OTHER_WORDS, PROMPTS, SOURCES, WORDS, suggested_column, suggested_key
from megatron_rl.planning.checked_config import idle_keys

ACTOR, REF, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "model"))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lr", f"{ACTOR}.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("critic.optm.lrr", "critic.optim.lr"),
        ("lora.rank", f"{MODEL}.lora.rank"),
        ("ref.megatron.tensor_model_parallel_sze", "actor_rollout_ref.ref.megatron.tensor_model_parallel_size"),
        ("reward_model.model.pth", "reward_model.model.path"),
        (f"{ACTOR}.optim.learning_rate", f"{ACTOR}.optim.lr"),
        ("critic.optim.learning_rate", "critic.optim.lr"),
        ("trainer.max_steps", "trainer.total_training_steps"),
        ("num_generations", "actor_rollout_ref.rollout.n"),
        ("critic.weight_decay", "critic.optim.weight_decay"),
        ("--rollout-batch-size", "data.train_batch_size"),
        ("--n-samples-per-prompt", "actor_rollout_ref.rollout.n"),
        ("val_kwargs.temperature", "actor_rollout_ref.rollout.val_kwargs.temperature"),
        ("logging_steps", None),
        ("trainer.magic", None),
    ],
)
def test_the_key_of_the_same_meaning_is_suggested(key, meant):
    """Another program's word, and the actor's key where no role is named. Would not catch a word that means something
    else in a third program.
    """
    assert suggested_key(key) == meant


def test_every_word_of_other_programs_leads_to_a_key():
    """Alone, and each word means one thing; what has no key says what to do. Words are no keys here.

    Would not catch a key that does something else than the word says.
    """
    assert {row.key for row in OTHER_WORDS} - {None} <= KEYS.keys()
    words = [word for row in OTHER_WORDS for word in {*row.all_words}]
    assert len(words) == len(set(words)) and not KEYS.keys() & {*words}
    assert {word: suggested_key(word) for word in words} == {word: row.key for word, row in WORDS.items()}
    assert all(row.note for row in OTHER_WORDS if row.key is None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rate=1e-4", f"unknown key learning_rate (override); did you mean: {ACTOR}.optim.lr=0.0001"),
        ("use_vllm=true", "unknown key use_vllm (override); vLLM always generates: leave it out"),
        ("bf16=true", f"did you mean: {ACTOR}.megatron.dtype (bfloat16, float16 or float32)"),
        (
            "beta=0.04",
            f"did you mean: {ACTOR}.kl_loss_coef (with actor.use_kl_loss=true; of DPO dpo.beta; of KL in the",
        ),
        (
            "rollout-batch-size=4",
            "did you mean: data.train_batch_size (counts prompts of a step, not responses: divide a",
        ),
    ],
)
def test_a_key_that_means_something_else_says_so(tmp_path, override, message):
    """Its value is then not taken over. Would not catch a wrong note."""
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: a, val_files: b}\n")
    (violation,) = read_run(file, [f"{MODEL}.path=m", override]).violations
    assert message in str(violation)


def test_the_page_has_the_tables():
    """Would not catch a page that says otherwise in its text."""
    page = other_words_table.PAGE.read_text()
    assert with_tables(page, other_words_table.tables(), "other_words_table.py") == page


@pytest.mark.parametrize(
    ("wanted", "usual", "names", "meant"),
    [
        ("prompt", PROMPTS, ("answer", "question"), "question"),
        ("prompt", PROMPTS, ("answer", "Problem"), "Problem"),
        ("prompt", PROMPTS, ("answer", "solution"), None),
        ("data_source", SOURCES, ("answer", "question"), None),
        ("data_source", SOURCES, ("answer", "dataset"), "dataset"),
        ("extra_promt", PROMPTS, ("answer", "extra_prompt"), "extra_prompt"),
        ("anser", ("completion", "answer"), ("question", "answer"), "answer"),
    ],
)
def test_a_column_of_the_same_meaning_is_suggested(wanted, usual, names, meant):
    """`answer` is spelt more like `prompt` and `data_source` than `question` is. Would not catch other languages."""
    assert suggested_column(wanted, usual, names) == meant
    assert not set(ANSWERS) & {*PROMPTS, *SOURCES}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("critic.optim.lr=1e-4",), ["without effect: critic.optim.lr, because this run has no critic"]),
        (("critic.optim.lr=1e-4", "algorithm.adv_estimator=gae"), []),
        (("critic.optim.lr=1e-4", "critic.enable=true"), []),
        (("critic.enable=false",), []),
        (("critic.use_dynamic_bsz=true",), ["without effect: critic.use_dynamic_bsz, because this run has no critic"]),
        (("critic.use_dynamic_bsz=true", "reward_models.one.model.path=r"), []),
        (
            tuple(f"{REF}.megatron.{name}_model_parallel_size=1" for name in ("tensor", "pipeline")),
            [
                f"without effect: {REF}.megatron.pipeline_model_parallel_size, "
                f"{REF}.megatron.tensor_model_parallel_size, because this run has no reference"
            ],
        ),
        ((f"{REF}.megatron.tensor_model_parallel_size=1", f"{ACTOR}.use_kl_loss=true"), []),
        (
            ("reward_model.model.path=r",),
            ["without effect: reward_model.model.path, because this run has no reward model"],
        ),
        (("reward_model.model.path=r", "reward_model.enable=true"), []),
        (("critic.optim.lr=1e-4", "trainer.val_only=true"), []),
    ],
)
def test_keys_of_absent_roles_are_named(tmp_path, overrides, expected):
    """In a run of GRPO, unless another key follows them. Would not catch keys that a role has and does not read."""
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: a, val_files: b}\nalgorithm: {adv_estimator: grpo}\n")
    given = [f"{MODEL}.path=m", *overrides]
    assert idle_keys(load_config(file, given), read_run(file, given).given) == expected
