"""Write a project to begin with: a configuration, a reward function, two data files. No torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron_rl.config.file_kinds import FILE, NOTHING, kind_of
from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.config.problems import raise_problems
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError, Violation
from megatron_rl.observe.appended_file import replace_file
from megatron_rl.planning.checked import checked
from megatron_rl.planning.hardware import planned_hardware
from megatron_rl.planning.memory_report import memory_report, with_kv_cache
from megatron_rl.planning.run_models import RunModels
from megatron_rl.starter.task_kinds import TASK_KINDS, rows

CONFIG, REWARD, TRAIN, VAL = "run.yaml", "reward.py", "train.jsonl", "val.jsonl"
PLAIN = re.compile(r"[A-Za-z0-9_./+@=~-]+")
"""Paths that YAML reads as text without quotes; they begin with a slash."""
GPUS_PER_NODE = 8
NUM_TRAIN, NUM_VAL = 256, 32

TEMPLATE = """\
# GRPO: answers to a prompt are compared with each other. Every key, with its meaning: megatron_rl/config/schema.py

data:
  train_files: {train}
  val_files: {val}
  train_batch_size: {prompts} # prompts per step
  max_prompt_length: {prompt_tokens} # tokens
  max_response_length: {answer_tokens}

actor_rollout_ref:
  model:
    path: {model}
  actor:
    ppo_mini_batch_size: {mini_batch} # prompts per optimizer step
    use_dynamic_bsz: true # as few passes as the tokens allow
    ppo_max_token_len_per_gpu: {pass_tokens}
    optim:
      lr: {lr}
    megatron:
      tensor_model_parallel_size: {tp} # ranks that share every layer
      pipeline_model_parallel_size: {pp} # ranks that each have some of the layers
      dtype: {dtype}{offload}
  rollout:
    n: 8 # answers to a prompt
    {cache}
    max_num_seqs: {num_seqs} # answers drawn together

algorithm:
  adv_estimator: grpo

custom_reward_function:
  path: {reward}

trainer:
  device: {device}
  nnodes: {nnodes}
  n_gpus_per_node: {per_node}
  total_training_steps: {steps}
  test_freq: {test_freq} # validate every so many steps
  save_freq: {save_freq} # write a checkpoint every so many steps; -1: never
  default_local_dir: {output}
"""
CPU = {
    "prompts": 16,
    "mini_batch": 16,
    "pass_tokens": 4096,
    "dtype": "float32",
    "offload": "",
    "cache": "kv_cache_memory_bytes: 67108864 # held only while generating",
    "num_seqs": 128,
    "device": "cpu",
    "steps": 20,
    "test_freq": 10,
    "save_freq": -1,
}
GPU = {
    "prompts": 128,
    "mini_batch": 64,
    "pass_tokens": 16384,
    "dtype": "bfloat16",
    "offload": "\n      grad_offload: true # generation has their room\n      optimizer_offload: true",
    "cache": "gpu_memory_utilization: 0.6 # of a GPU, for generation",
    "num_seqs": 256,
    "device": "cuda",
    "steps": 200,
    "test_freq": 20,
    "save_freq": 20,
}
LR, TINY_LR = "1e-6", "3e-3"
"""Learning rates: of a pretrained model, and of the tiny model, whose weights are random."""


def write_project(folder: Path, model: Path, name: str, num_gpus: int, is_tiny: bool) -> RunConfig:
    """Write the four files and return the configuration. num_gpus: 0 is one CPU process.

    On GPUs the first layout is taken whose plan fits one of 80 GB: the smallest TP, then the fewest stages. Raises
    ConfigError where the model cannot be trained at all, or in no layout of so many GPUs.
    """
    there = [file for file in (CONFIG, REWARD, TRAIN, VAL) if os.path.lexists(folder / file)]
    if there:
        raise ConfigError(f"{folder} already has {', '.join(there)}; try: another folder, such as {folder}_2")
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    is_chat = not is_tiny and has_template(model)
    for file, number, seed in ((TRAIN, NUM_TRAIN, 1), (VAL, NUM_VAL, 2)):
        drawn = rows(TASK_KINDS[name], name, number, seed, is_chat)
        replace_file(folder / file, "".join(json.dumps(row) + "\n" for row in drawn).encode())
    replace_file(folder / REWARD, TASK_KINDS[name].reward.encode())
    try:
        return choose_layout(folder, model, name, num_gpus, is_tiny)
    except ConfigError:
        for file in (CONFIG, REWARD, TRAIN, VAL):
            (folder / file).unlink(missing_ok=True)
        for each in new:
            with suppress(OSError):  # something of another process is in it
                each.rmdir()
        raise


def choose_layout(folder: Path, model: Path, name: str, num_gpus: int, is_tiny: bool) -> RunConfig:
    """Write run.yaml with the first layout that fits, and return it. Raises ConfigError where none does."""
    broken, too_large, least = list[Violation](), "", 0.0
    for tp, pp in layouts(num_gpus):
        if tp * pp < least:
            continue
        replace_file(folder / CONFIG, config_text(folder, model, name, num_gpus, is_tiny, tp, pp).encode())
        run = checked(folder / CONFIG, (), without_files=not any(model.glob("*.safetensors")))
        if run.config is None or run.violations:
            broken = broken or run.violations
            continue
        used, usable = memory_of(run.config)
        if used <= usable:
            return run.config
        too_large = too_large or f"it needs {used / 1e9:.1f} GB of {usable / 1e9:.1f} GB"
        # More ranks to a model take at most their share of what a rank holds.
        least = 0.9 * used / usable * tp * pp
    if too_large:
        raise ConfigError(f"no layout of {num_gpus} GPUs was planned to fit: {too_large}; try: --gpus {2 * num_gpus}")
    raise_problems("no run could start with this model", broken)
    raise AssertionError("there is always a layout of one rank")


def has_template(model: Path) -> bool:
    """Whether a model's tokenizer has a chat template. Raises ConfigError for settings that cannot be read."""
    file = model / "tokenizer_config.json"
    if kind_of(model / "chat_template.jinja") == FILE:
        return True
    try:
        return kind_of(file) != NOTHING and "chat_template" in read_json_object(file)
    except UnreadableFileError as error:
        raise ConfigError(f"the tokenizer of {model} cannot be read: {error}") from error


def check_name(option: str, path: str | Path) -> None:
    """Raise ConfigError for a path that run.yaml cannot hold."""
    text = str(path)
    if not text.isprintable() or "${" in text:
        rule = "must be a path of printable characters in UTF-8 without ${, which run.yaml reads as the name of a key"
        raise ConfigError(f"{option} {text} {rule}; try: {option} {re.sub(r'[^A-Za-z0-9_./-]+', '_', text)}")


def in_yaml(path: Path) -> str:
    """Return a path as a value of YAML: in quotes where its characters have another meaning there."""
    text = str(path)
    return text if PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def layouts(num_gpus: int) -> Iterator[tuple[int, int]]:
    """TP and PP to try on so many GPUs; (1, 1) on a CPU."""
    most = max(1, num_gpus)
    for pp in (size for size in (1, 2, 4, 8, 16) if most % size == 0):
        yield from ((tp, pp) for tp in (1, 2, 4, 8) if tp <= min(most, GPUS_PER_NODE) and most % (tp * pp) == 0)


def config_text(folder: Path, model: Path, name: str, num_gpus: int, is_tiny: bool, tp: int, pp: int) -> str:
    """The text of run.yaml."""
    kind, per_node = TASK_KINDS[name], min(max(1, num_gpus), GPUS_PER_NODE)
    sizes = {"per_node": per_node, "nnodes": max(1, num_gpus) // per_node, "tp": tp, "pp": pp}
    limits = {"prompt_tokens": kind.prompt_tokens, "answer_tokens": kind.answer_tokens}
    whole = folder.resolve()
    files = {"train": whole / TRAIN, "val": whole / VAL, "reward": whole / REWARD, "output": whole / "output"}
    paths = {each: in_yaml(path) for each, path in (files | {"model": model.resolve()}).items()}
    paths["lr"] = TINY_LR if is_tiny else LR
    return TEMPLATE.format(**(GPU if num_gpus else CPU), **sizes, **limits, **paths)


def memory_of(config: RunConfig) -> tuple[int, int]:
    """The bytes that a rank is planned to need, and those that a GPU has for it; none are needed on a CPU."""
    if config.trainer.device == "cpu":
        return 0, 0
    hardware = planned_hardware(config)
    memory = memory_report(with_kv_cache(config, hardware), RunModels(config), hardware)
    return memory.peak, memory.usable
