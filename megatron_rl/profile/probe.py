"""Inputs of a profile: small random models, prompts and a reward function in a folder, and their configuration."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

HIDDEN = {"cpu": 256, "cuda": 2048}
HEADS = {"cpu": 4, "cuda": 16}
VOCABULARY = 64
SHALLOW, DEEP = 2, 6
"""Layers of the two models."""
MICRO_BATCH = 16
"""Rows of a pass."""
LONGEST_PROMPT, LONGEST_RESPONSE = 48, 32
LONGEST_ROW = 256
"""Positions of the models."""
NUM_PROMPTS, SAMPLES = 16, 4
"""Prompts of a step of the short run, and samples of each."""
RUN_PROMPT, RUN_RESPONSE = 8, 8
RUN_STEPS, WARM_UP = 5, 2
RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(set(solution_str))) / max(1, len(solution_str))
"""


def save_model(folder: Path, num_layers: int, device: str, longest: int = LONGEST_ROW, is_empty: bool = False) -> None:
    """Save a Qwen2 with random weights and a tokenizer of single characters. Imports torch and transformers.

    longest: most tokens of a row. is_empty: without the weights, which a plan does not read.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(num_layers)
    hidden, heads = HIDDEN[device], HEADS[device]
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=2,
    )
    config.dtype = getattr(torch, dtype_of(device))
    if is_empty:
        config.architectures = [Qwen2ForCausalLM.__name__]
        config.save_pretrained(folder)
    else:
        Qwen2ForCausalLM(config).to(config.dtype).save_pretrained(folder)
    characters = [chr(code) for code in range(48, 48 + VOCABULARY - 4)]
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *characters])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)


def save_data(folder: Path) -> None:
    """Save prompts of equal length in one file, and a reward function."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "data_source": "probe",
            "prompt": f"{number:0{RUN_PROMPT}d}",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(4 * NUM_PROMPTS)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "prompts.parquet")
    (folder / "rule.py").write_text(RULE)


def settings(folder: Path, model: Path, device: str, num_ranks: int, longest: int) -> dict[str, Any]:
    """Return the configuration of a PPO run with critic and reference. longest: most tokens of a response."""
    data = str(folder / "prompts.parquet")
    return {
        "data": {
            "train_files": data,
            "val_files": data,
            "train_batch_size": NUM_PROMPTS,
            "max_prompt_length": LONGEST_PROMPT,
            "max_response_length": longest,
        },
        "actor_rollout_ref": {
            "model": {"path": str(model)},
            "actor": {
                "ppo_mini_batch_size": NUM_PROMPTS,
                "ppo_micro_batch_size_per_gpu": MICRO_BATCH,
                "ppo_epochs": 1,
                "megatron": {"dtype": dtype_of(device)},
            },
            "rollout": {
                "n": SAMPLES,
                "log_prob_micro_batch_size_per_gpu": MICRO_BATCH,
                "kv_cache_memory_bytes": 64 << 20,
                "max_num_seqs": 64,
                "max_num_batched_tokens": 4096,
            },
        },
        "algorithm": {"use_kl_in_reward": True},
        "custom_reward_function": {"path": str(folder / "rule.py")},
        "trainer": {
            "device": device,
            "n_gpus_per_node": num_ranks,
            "total_training_steps": RUN_STEPS,
            "test_freq": 0,
            "val_before_train": False,
            "export_hf": False,
            "save_freq": -1,
            "logger": ["console", "jsonl"],
            "default_local_dir": str(folder / "unused"),
        },
    }


def cut(content: dict[str, Any], tp_size: int, cp_size: int) -> dict[str, Any]:
    """Return a copy of the settings with TP and CP in training and the same TP in generation."""
    changed = copy.deepcopy(content)
    shared = changed["actor_rollout_ref"]
    shared["actor"]["megatron"] |= {"tensor_model_parallel_size": tp_size, "context_parallel_size": cp_size}
    shared["rollout"]["tensor_model_parallel_size"] = tp_size
    return changed


def dtype_of(device: str) -> str:
    """Return the dtype of the roles on a device."""
    return "float32" if device == "cpu" else "bfloat16"


def write_config(content: dict[str, Any], file: Path) -> Path:
    """Write settings as YAML; return the file."""
    file.write_text(yaml.safe_dump(content))
    return file
