"""Model folders that preflight can read: a good config.json to change one thing of, and empty files beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

from megatron_rl.checkpoint.weight_files import BITS
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.folder_checks import STARTING_POINTS
from megatron_rl.planning.preflight import preflight

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 384,
    "intermediate_size": 192,
    "max_position_embeddings": 64,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "num_key_value_heads": 6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": 4096,
    "use_sliding_window": False,
    "vocab_size": 100,
}

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


NO_TENSORS = (8).to_bytes(8, "little") + b"{}      "
"""A whole file of safetensors without any."""
TOKENIZER = json.dumps({"model": {"vocab": {}}, "added_tokens": []})

ROW = {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2"}, "question": "1+1"}
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


def problems(config: RunConfig) -> list[str]:
    """The violations as text."""
    return [str(violation) for violation in preflight(config)]


def write_prompts(file: Path, **changes) -> str:
    """One row in verl's schema; a column whose value is None is left out."""
    row = {name: value for name, value in (ROW | changes).items() if value is not None}
    if file.suffix == ".jsonl":
        file.write_text(json.dumps(row) + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    return str(file)


def write_model(folder, **changes) -> str:
    folder.mkdir(exist_ok=True)
    settings = MODEL | changes
    names = settings["architectures"]
    family = STARTING_POINTS.get(str(names[0])) if isinstance(names, list) and names else None
    settings = ({} if family is None else {"model_type": family.model_type}) | settings
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return str(folder)


def safetensors(num_bytes: int, name: str = "model.norm.weight", **entry) -> bytes:
    """A file with one tensor, of float32 unless `entry` says otherwise; all of it is 0."""
    entry = {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]} | entry
    header = json.dumps({name: entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


def write_tensors(file: Path, types: dict[str, str], last: int = 0) -> None:
    """A file of tensors (name -> type) of 16 bytes, all 0 but for the last one's last byte."""
    places = {name: [16 * place, 16 * place + 16] for place, name in enumerate(types)}
    shapes = {name: [16 * 8 // BITS.get(kind, 4)] for name, kind in types.items()}
    entries = {name: {"dtype": types[name], "shape": shapes[name], "data_offsets": places[name]} for name in types}
    header = json.dumps(entries).encode()
    content = bytes(16 * len(types) - 1) + bytes([last])
    file.write_bytes(len(header).to_bytes(8, "little") + header + content)


def set_experts(config: RunConfig, **sizes) -> None:
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        for name, value in sizes.items():
            setattr(role.megatron, name, value)
