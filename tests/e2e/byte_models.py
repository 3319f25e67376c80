"""Models whose tokens are bytes, so that they read and write what any package does."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from pathlib import Path

from command_line import CommandLine

TAUGHT = "configs/stages/agent_model_cpu.yaml"
LETTERS = string.ascii_letters + string.digits + string.punctuation
ROLES = ("user", "assistant")
CONTEXT = 2048
"""Tokens, each a byte."""
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def untrained_model(folder: Path, num_layers: int = 2, hidden_size: int = 64, seed: int = 0) -> Path:
    """A Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    names = ["<pad>", "<eos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **tokens).save_pretrained(folder)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": num_layers}
    number = hidden_size // 32
    heads = {"num_attention_heads": number, "num_key_value_heads": number, "max_position_embeddings": CONTEXT}
    torch.manual_seed(seed)
    config = Qwen2Config(vocab_size=264, **sizes, **heads, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1)
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    return folder


def taught_model(folder: Path, lessons: Sequence[list[dict[str, str]]], *keys: str, **sizes: int) -> Path:
    """A model that has learnt transcripts by `megatron-rl sft`, in batches of their order. keys: overrides."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    table = pyarrow.Table.from_pylist([{"messages": messages} for messages in lessons])
    pyarrow.parquet.write_table(table, folder / "lessons.parquet")
    pyarrow.parquet.write_table(table.slice(0, 32), folder / "held_out.parquet")
    files = (f"data.train_files={folder}/lessons.parquet", f"data.val_files={folder}/held_out.parquet")
    model = f"actor_rollout_ref.model.path={untrained_model(folder / 'untrained', **sizes)}"
    stage = CommandLine(folder, "--local", *files, model, *keys, config=TAUGHT, stage="sft")
    try:
        assert stage.wait(1500) == 0, stage.text()
    finally:
        stage.kill_all()
    return stage.run / "hf_model"


def speaker(folder: Path, says: Sequence[str]) -> Path:
    """A model that says one of a few texts, whatever it reads."""
    draw = random.Random(0)

    def transcript() -> list[dict[str, str]]:
        turns = [("".join(draw.choices(LETTERS, k=draw.randint(1, 9))), draw.choice(says)) for _ in range(6)]
        return [{"role": role, "content": text} for turn in turns for role, text in zip(ROLES, turn, strict=True)]

    size, steps = 16, 120
    keys = (f"data.train_batch_size={size}", f"trainer.total_training_steps={steps}", "data.max_length=256")
    return taught_model(
        folder, [transcript() for _ in range(size * steps)], "actor_rollout_ref.actor.optim.lr=5e-3", *keys
    )
