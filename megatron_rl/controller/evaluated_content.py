"""What the responses of an evaluation depend on, by content: model, adapters, prompts, what scores, what answers turns.

A file or folder that a key names stands for what is in it: another model under the same path is another one, and a copy
under another path is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.identity import SHOWN, WEIGHTS, digest_of, folder_identity, weights_digest
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.checkpoint.weight_files import read_weight_files
from megatron_rl.config.json_files import UnreadableFileError
from megatron_rl.config.schema import GROUND_TRUTH, RunConfig, as_list
from megatron_rl.planning.hub_cache import model_folder

PATHS = ("path", "adapter_path", "input_tokenizer", "function_tool_path", "tool_config_path")
"""Keys of the groups below that name a file or a folder."""
TEXTS = ("*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")
"""Files of a model's folder that say how prompts become tokens, and which tokens end a response."""
PROMPT_KEYS = ("prompt_key", "reward_fn_key", "apply_chat_template_kwargs", "filter_overlong_prompts", "truncation")
NEWER_PROMPT_KEYS = {"ground_truth_key": GROUND_TRUTH, "default_data_source": None, "prompt_as_chat": None}
"""Keys, with their defaults, that count where they are set: evaluations of older versions do not have them."""
ROW_KEYS = ("val_max_samples", "shuffle", "seed")
"""Keys that choose rows, where val_max_samples is set."""
EIGHT_BIT_KEYS = ("quantization", "quantization_block_size")
SCORE_KEYS = ("rule_weight", "failed_score", "overlong_buffer")
MODEL_KEYS = ("model", "weight", "data_sources", "normalize_reward", "reward_clip_range", "max_length")
NO_MATTER = ("num_workers", "planned_wait_s")
"""Keys of turns that no response depends on."""


def evaluated_content(config: RunConfig) -> dict[str, Any]:
    """Return dotted name -> value or digest, JSON-ready. config: made by `config.eval_config`. Raises OSError."""
    shared, data, scored = config.actor_rollout_ref, config.data, config.reward_model
    rollout, rule = shared.rollout, config.custom_reward_function
    groups: dict[str, Any] = {
        "model": {"path": shared.model.path},
        "override_config": asdict(shared.model.override_config),
        "dtype": shared.actor.megatron.dtype,
        "adapter": asdict(shared.model.lora) if shared.model.lora.rank else None,
        "prompts": {"files": [digest_of(Path(file).expanduser())[:SHOWN] for file in as_list(data.val_files)]}
        | {key: getattr(data, key) for key in PROMPT_KEYS}
        | {key: value for key, usual in NEWER_PROMPT_KEYS.items() if (value := getattr(data, key)) != usual}
        | ({key: getattr(data, key) for key in ROW_KEYS} if data.val_max_samples > 0 else {}),
        "eight_bits": {key: getattr(rollout, key) for key in EIGHT_BIT_KEYS},
        "rule": {"path": rule.path, "name": rule.name, "reward_kwargs": rule.reward_kwargs}
        | ({"per_group": True} if rule.per_group else {}),  # evaluations of older versions do not have it
        "scores": {key: value for key, value in asdict(scored).items() if key in SCORE_KEYS},
        "turns": None,
    }
    if rollout.multi_turn.enable:
        groups["turns"] = {key: value for key, value in asdict(rollout.multi_turn).items() if key not in NO_MATTER}
    for name, model in config.scoring_models.items():
        own = {key: value for key, value in asdict(model).items() if key in MODEL_KEYS}
        asked = {"judge": asdict(model.judge)} if model.is_judge else {}
        groups[f"reward_models.{name}"] = own | asked | {"dtype": model.megatron.dtype}
    return dict(json.loads(json.dumps(_flat("", groups), default=str)))


def _flat(name: str, value: Any) -> dict[str, Any]:
    """The settings below a group, under dotted names; files and folders as digests of their content."""
    own = name.rpartition(".")[2]
    if own in PATHS and isinstance(value, str):
        value = _content(value)
    elif own == "command" and isinstance(value, list):
        return {name: [_content(each) if Path(each).is_file() else each for each in value]}
    if not isinstance(value, Mapping):
        return {name: value}
    inner = (_flat(f"{name}.{key}".removeprefix("."), each) for key, each in value.items())
    return {key: content for part in inner for key, content in part.items()}


def _content(path: str) -> Any:
    """The digest of a file, digests of what a folder holds, and a text that names neither as it is."""
    file = Path(path).expanduser()
    if file.is_file():
        return digest_of(file)[:SHOWN]
    folder = model_folder(path).path
    return folder_content(folder) if folder.is_dir() else path


def folder_content(folder: Path) -> dict[str, Any]:
    """Return the identity of the model in a folder, with a block of every tensor, and a digest of each further file.

    Of another folder, such as an adapter's, the digests of its files. Raises OSError.
    """
    texts = sorted(file for pattern in TEXTS for file in folder.glob(pattern) if not file.name.endswith(".index.json"))
    content: dict[str, Any] = {
        str(file.relative_to(folder)): digest_of(file)[:SHOWN] for file in texts if file.is_file()
    }
    tensors, _ = read_weight_files(folder)
    content["tensors"] = weights_digest(tensors, len(tensors))
    with suppress(UnreadableFileError):  # no model: its files say all
        identity = folder_identity(ModelFolder(folder))
        content |= {name: value for name, value in identity.items() if name != WEIGHTS}  # of fewer tensors
    return content
