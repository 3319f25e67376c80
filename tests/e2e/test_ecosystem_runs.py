"""Runs with other packages' environments and with real clients, each package in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import REPOSITORY
from short_runs import WITHOUT_RAY, metrics
from test_agent_runs import BOUND, GRPO, LONG, SHORT, TURNS, agent, differences, environment
from test_async_runs import ASYNC, SMALL, assert_same_bits, events

pytestmark = [pytest.mark.dist, pytest.mark.weekly, pytest.mark.exhaustive, pytest.mark.timeout(1800)]

OF_PACKAGES = REPOSITORY / "tests/agents/ecosystems"
FEW = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=2")
TEN = (*SMALL, *FEW, "--local", "--collapse", "trainer.total_training_steps=10", "trainer.test_freq=5040")
CONTEXT = 2048
"""Tokens, each a byte."""
ROOM = ("data.max_prompt_length=1400", "data.max_response_length=256", "trainer.val_before_train=false")
ENGINE = ("actor_rollout_ref.rollout.max_num_batched_tokens=8192", "actor_rollout_ref.rollout.max_num_seqs=16")


def untrained_model(folder: Path, num_layers: int = 2, hidden_size: int = 64) -> Path:
    """A model whose tokens are bytes: it can read what packages write."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    names = ["<pad>", "<eos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **tokens).save_pretrained(folder)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": num_layers}
    number = hidden_size // 32
    heads = {"num_attention_heads": number, "num_key_value_heads": number, "max_position_embeddings": CONTEXT}
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=264, **sizes, **heads, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1)
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_model(tmp_path_factory.mktemp("text") / "model")


def made_rows(python: str, source: str, file: Path, *settings: str, seed: int = 0, size: int = 160) -> Path:
    """Rows of an adapter's tasks, as a user makes them."""
    command = [sys.executable, "-m", "megatron_rl", "dataset", "--from", source, "--python", python]
    command += [f"--out={file}", f"--size={size}", f"--seed={seed}", *settings]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return file


def files(rows: Path) -> tuple[str, ...]:
    return f"data.train_files={rows}", f"data.val_files={rows}"


def test_real_clients_drive_a_run(command_line, interpreter) -> None:
    """Four clients over three protocols, with streams and limits: what they read is what is trained. Would not catch
    calls, which test_real_packages.py plays, nor cancelled requests, of which test_agent_runs.py has some.
    """
    way = agent(f"path={OF_PACKAGES}/real_clients.py", "kwargs={trains: true}", "name=run")
    python = f"{TURNS}.python={interpreter('openai anthropic openai-agents')}"
    keys = (*SHORT, WITHOUT_RAY, "trainer.n_gpus_per_node=1", "trainer.test_freq=5040", "actor_rollout_ref.rollout.n=2")
    one = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"
    run = command_line(*keys, one, *way, python, LONG, "actor_rollout_ref.rollout.temperature=1.0", config=GRPO)
    assert run.wait() == 0, run.text()
    steps = [line for line in metrics(run).values() if "num_turns/mean" in line]
    assert len(steps) == 2 and all(line["episode/failed_ratio"] == 0 for line in steps)
    assert all(line["num_turns/max"] == 2 for line in steps)
    assert not any("environment/agent_refused/mean" in line for line in steps)
    assert 0 < max(differences(run)) < 3 * BOUND and run.left_over() == []


def test_ten_steps_are_repeated_without_the_package(
    command_line, interpreter, text_model, tmp_path, monkeypatch
) -> None:
    """No episode fails, and a replay has the same bits with an interpreter that does not exist. Would not catch a
    policy that cannot learn: what is repeated is drawn by an untrained one.
    """
    monkeypatch.setenv("PYTHONPATH", str(OF_PACKAGES))
    python, path = interpreter("reasoning-gym"), "path=adapter:reasoning_gym"
    keys = (*TEN, *ROOM, *ENGINE, f"actor_rollout_ref.model.path={text_model}")
    rows = made_rows(python, "reasoning_gym:gcd", tmp_path / "rows.parquet")
    own = (f"{TURNS}.environment.{path}", f"{TURNS}.environment.kwargs={{tag: answer}}")
    way = (*environment("Environment"), *own, *ROOM, *files(rows))
    run = command_line(*keys, *way, f"{TURNS}.python={python}", config=ASYNC)
    assert run.wait() == 0, run.text()
    steps = [line for line in metrics(run).values() if "num_turns/mean" in line]
    assert len(steps) == 10 and all(line["episode/failed_ratio"] == 0 for line in steps)
    again = command_line(*keys, *way, f"{TURNS}.python=/nowhere/python", f"--replay={run.run}", config=ASYNC)
    assert again.wait() == 0, again.text()
    assert_same_bits(again, run)
    assert events(again, "turn") == events(run, "turn")
