"""Scores of a reward model with a vocabulary and chat template of its own, from prompt file to number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_models import SIZES, run_config, save_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from megatron_rl.config.schema import RunConfig
from megatron_rl.records import ragged, single_turn
from megatron_rl.scoring.text_reader import ReadText

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

LETTERS = "abcdefghijklmnopqrstuvwxyz "
POLICY = ["<eos>", "<pad>", *LETTERS]
WORDS = ["the", "sun", "is", "hot", "a", "cat", "sat", "on", "mats"]
OWN = ["<s>", "?", "<user>", "<assistant>", "<end>", *WORDS]
TEMPLATE = "{{ bos_token }}{% for m in messages %} <{{ m['role'] }}> {{ m['content'] }} <end>{% endfor %}"
QUESTIONS = ["is the sun hot", "on", "the cat sat", "is a cat hot", "the sun sat on the cat", "a", "hot mats", "is"]
ANSWERS = ["the sun is hot", "", "on mats", "a hot cat sat on the mats", "is", "a a a a a a a a", "the", "cat"]
LONGEST = 14
"""Conversations of more tokens are cut."""

DYNAMIC = {"reward_model__use_dynamic_bsz": True, "reward_model__forward_max_token_len_per_gpu": 48}
DYNAMIC |= {"data__max_prompt_length": 24, "data__max_response_length": 24}


def save_policy_tokenizer(folder: Path) -> None:
    """One token a letter."""
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(POLICY)}, unk_token="<pad>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", chat_template=template
    ).save_pretrained(folder)


def save_judge(folder: Path) -> str:
    """A classifier that reads words: 40 rows of embeddings for 14 tokens, where the policy has 70 for 29."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": 40, "pad_token_id": 39}
    model = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1))
    model.float().save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(OWN)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="?", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return str(folder)


def read(config: RunConfig) -> ReadText:
    """What the reward model is given, by the way of a run: prompt files, the policy's tokens, the reader."""
    from megatron_rl.checkpoint.model_folder import model_folders
    from megatron_rl.data.prompt_dataset import PromptDataset
    from megatron_rl.scoring.rewards import text_readers

    folders = model_folders(config)
    tokenizer = folders[config.actor_rollout_ref.model.path].tokenizer
    data = PromptDataset([config.data.train_files], tokenizer, config.data, False, keeps_text=True)
    readers, notes = text_readers(config, folders, [data])
    assert notes == []
    prompts = data.batch(range(len(data)))
    answers = [torch.tensor([*tokenizer(text)["input_ids"], 0]) for text in ANSWERS]
    pairs = zip(prompts["input_ids"].unbind(), answers, strict=True)
    rows = single_turn(ragged([torch.cat(pair) for pair in pairs]), torch.tensor([len(answer) for answer in answers]))
    rows.add(prompts.without("input_ids"))
    return readers["reward_model"].read(rows)


def scores(config: RunConfig) -> tuple[int, torch.Tensor] | None:
    """(data-parallel rank, scores of its share) on its collector."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("reward_model")
    where = worker.coordinates()
    mine = read(config).batch[torch.arange(len(ANSWERS)).tensor_split(where.dp_size)[where.dp_rank]]
    record = worker.roles["reward_model"].scores(mine)
    return (where.dp_rank, record["scores"]) if where.dp_collector else None


@torch.no_grad()
def classifier_scores(folder: str) -> list[float]:
    """transformers alone, a row at a time: its own template and tokenizer, the first LONGEST tokens, its own head."""
    model, tokenizer = (
        LlamaForSequenceClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    found = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)[:LONGEST]
        found.append(float(model(torch.tensor([ids])).logits[0, 0]))
    return found


@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (2, DYNAMIC)], ids=["one process", "DP2 dynamic"])
def test_scores_equal_the_classifiers_of_the_rendered_conversation(world_size, options, tmp_path: Path) -> None:
    """Relative 1e-5 in float32; one conversation is cut. Would not catch a template that the model never saw."""
    policy, judge = tmp_path / "policy", save_judge(tmp_path / "judge")
    save_llama(policy)
    save_policy_tokenizer(policy)
    rows = [{"prompt": [{"role": "user", "content": question}], "data_source": "x"} for question in QUESTIONS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"reward_model__enable": True, "reward_model__model__path": judge, "reward_model__max_length": LONGEST}
    keys |= {"reward_model__model__input_tokenizer": str(policy), "reward_model__micro_batch_size_per_gpu": 3}
    keys |= {"data__train_files": str(tmp_path / "train.jsonl")}
    config = run_config(str(policy), 1, 1, **keys | options)
    answers = [answer for answer in run_ranks(world_size, scores, config) if answer is not None]
    found = torch.cat([share for _, share in sorted(answers, key=lambda answer: answer[0])]).tolist()
    expected = classifier_scores(judge)
    assert found == pytest.approx(expected, rel=1e-5)
    assert torch.tensor(expected).std() > 0.01
    assert read(config).is_cut.tolist() == [
        len(f"{q} {a}".split()) + 5 > LONGEST for q, a in zip(QUESTIONS, ANSWERS, strict=True)
    ]
