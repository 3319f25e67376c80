"""A run whose reward model has a tokenizer and a chat template of its own, beside one that reads the actor's tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import REPOSITORY
from short_runs import LOCAL, ONE, SHORT, WITHOUT_RAY, metrics
from test_reward_model_run import save_reward_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

DEMO = REPOSITORY / "assets/demo"
OWN = ["<s>", "?", "<user>", "<assistant>", "<end>", *"=+9876543210"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
OWN_POOL = (
    WITHOUT_RAY,
    "reward_model.enable_resource_pool=true",
    "reward_model.nnodes=1",
    "reward_model.n_gpus_per_node=1",
)
LONGEST = 14
"""A sum has 10 tokens without the answer's: answers of more than 4 digits are cut."""


def save_judge(folder: Path) -> Path:
    """A random classifier that reads digits under other numbers than the demo's actor."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(OWN),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
        pad_token_id=1,
        num_labels=1,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(OWN)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z]+>|."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="?", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return folder


@torch.no_grad()
def judged(folder: Path, rows: list[dict]) -> list[float]:
    """What transformers' classifier says of the questions and answers of a sample table."""
    model, tokenizer = (
        LlamaForSequenceClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    found = []
    for row in rows:
        chat = [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": row["output"]}]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)[:LONGEST]
        found.append(float(model(torch.tensor([ids])).logits[0, 0]))
    return found


@pytest.mark.parametrize(
    "options", [LOCAL, pytest.param(ONE, marks=pytest.mark.exhaustive)], ids=["local", "pool of its own"]
)
def test_a_reward_model_of_another_vocabulary(command_line, options, tmp_path: Path) -> None:
    """Two steps, and after those on a pool of its own a third in one process: the score is the weighted sum of the
    classifier's, of a second model's and of the rule's, and moves the policy.

    Would not catch a judge that was trained with another template.
    """
    tables, judge = tmp_path / "tables", save_judge(tmp_path / "judge")
    keys = (
        *SHORT,
        *options,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "reward_model.enable=true",
        "reward_model.rule_weight=2",
        f"reward_model.model.path={judge}",
        f"reward_model.model.input_tokenizer={DEMO / 'model'}",
        f"reward_model.max_length={LONGEST}",
        "reward_model.megatron.param_offload=true",
        f"reward_models.strict.model.path={save_reward_model(tmp_path / 'strict')}",
        "reward_models.strict.weight=0.25",
        "trainer.val_before_train=true",
        f"trainer.save_freq={2 if options is ONE else 0}",
        "trainer.export_hf=false",
        f"trainer.rollout_data_dir={tables}",
    )
    num_steps = 2
    run = again = command_line(*keys, *(OWN_POOL if options is ONE else ()), "trainer.total_training_steps=2")
    assert run.wait() == 0, run.text()
    if options is ONE:
        num_steps, again = 3, command_line(*keys, "--local", "trainer.total_training_steps=3", folder=run.folder)
        assert again.wait() == 0, again.text()
    logged = metrics(again)
    for step in range(1, num_steps + 1):
        rows = [json.loads(line) for line in (tables / f"{step}.jsonl").read_text().splitlines()]
        assert len(rows) == 16 and len({row["rm_score"] for row in rows}) > 4
        assert [row["rm_score"] for row in rows] == pytest.approx(judged(judge, rows), rel=1e-4, abs=1e-5)
        for row in rows:
            total = 2 * row["rule_score"] + row["rm_score"] + 0.25 * row["strict_score"]
            assert row["score"] == pytest.approx(total, abs=1e-5)
        cut = [float(len(row["input"]) + len(row["output"]) + 5 > LONGEST) for row in rows]
        assert [row["rm_truncated"] for row in rows] == cut
        assert logged[step]["reward/rm_truncated/mean"] == pytest.approx(sum(cut) / len(cut))
        assert logged[step]["actor/grad_norm"] > 0
    assert "val-aux/demo/addition/rm_truncated/mean@1" in logged[0]
    assert run.left_over() == again.left_over() == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reward_model.max_length=5", "max_length=5 is too small: reward_model would read nothing of any response"),
        pytest.param(
            "reward_model.model.input_tokenizer=/no/such/folder",
            "must be the folder of the actor's tokenizer, and it does not exist",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_mistakes_are_said_before_any_process(command_line, override, said, tmp_path: Path) -> None:
    """Exit code 2. Would not catch a mistake that only some answers show."""
    run = command_line(
        *SHORT,
        *ONE,
        "reward_model.enable=true",
        f"reward_model.model.path={save_judge(tmp_path / 'judge')}",
        f"reward_model.model.input_tokenizer={DEMO / 'model'}",
        override,
    )
    assert run.wait() == 2 and said in run.text(), run.text()
    assert run.left_over() == []
