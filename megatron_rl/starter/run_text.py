"""The text of run.yaml: one template, with sizes for CPUs and for GPUs. No torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLAIN = re.compile(r"[A-Za-z0-9_./+@=~-]+")
"""Paths that YAML reads as text without quotes; they begin with a slash."""
GPUS_PER_NODE = 8
SMALL_LR, LR = "3e-4", "1e-6"
TINY_LR = f"3e-3 # for random weights; {SMALL_LR} where the model was fine-tuned first"
"""Learning rates: of a small model, of others, and of the tiny model."""
SMALL_BYTES = 64 << 20
"""Bytes of the weights of a small model, at most."""

TEMPLATE = """\
# GRPO: responses to a prompt are compared with each other. Every key, with its meaning: megatron_rl/config/schema.py

data:
  train_files: {train}
  val_files: {val}{data_keys}
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
    n: {samples} # responses to a prompt
    {cache}
    max_num_seqs: {num_seqs} # responses generated together

algorithm:
  adv_estimator: grpo

custom_reward_function:
  {reward}

trainer:
  device: {device}
  nnodes: {nnodes}
  n_gpus_per_node: {per_node}{launcher}
  total_training_steps: {steps}
  test_freq: {test_freq} # validate every N steps
  save_freq: {save_freq} # write a checkpoint every N steps; -1: never
  max_ckpt_to_keep: 2 # the newest ones
  default_local_dir: {output}
"""
CPU = {
    "pass_tokens": 4096,
    "dtype": "float32",
    "offload": "",
    "num_seqs": 128,
    "device": "cpu",
    "steps": 20,
    "test_freq": 10,
    "save_freq": 5,
}
GPU = {
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
SMALL_CACHE, CACHE = 64 << 20, 512 << 20
"""Bytes of the KV cache on a CPU: of small models, and of others."""


@dataclass(frozen=True)
class BatchSize:
    """prompts: of a step. samples: responses to each."""

    prompts: int
    samples: int


GPU_BATCH = BatchSize(128, 8)
CPU_BATCHES = (*(BatchSize(prompts, 8) for prompts in (16, 8, 4)), BatchSize(4, 4), BatchSize(2, 4))
"""Batches to try on a CPU, the largest first."""


@dataclass(frozen=True)
class RunText:
    """What run.yaml says beside the layout.

    model: a folder, or a name of the Hub. reward: a file, or the name of a built-in reward function. prompt_tokens,
    answer_tokens: limits. is_tiny: the model knows nothing yet. is_small: its weights have at most SMALL_BYTES.
    data_keys: further keys of `data`.
    """

    train: Path
    val: Path
    model: str
    reward: Path | str
    output: Path
    num_gpus: int
    is_tiny: bool
    is_small: bool
    prompt_tokens: int
    answer_tokens: int
    data_keys: dict[str, Any] = field(default_factory=dict)

    def text(self, tp: int, pp: int, batch: BatchSize) -> str:
        """Return the whole file."""
        per_node = min(max(1, self.num_gpus), GPUS_PER_NODE)
        nnodes = max(1, self.num_gpus) // per_node
        cache = SMALL_CACHE if self.is_tiny or self.is_small else CACHE
        cpu = CPU | {"mini_batch": batch.prompts, "cache": f"kv_cache_memory_bytes: {cache} # held while generating"}
        sizes = {"prompts": batch.prompts, "samples": batch.samples, "tp": tp, "pp": pp, "per_node": per_node}
        limits = {"prompt_tokens": self.prompt_tokens, "answer_tokens": self.answer_tokens}
        paths = {name: in_yaml(str(getattr(self, name))) for name in ("train", "val", "model", "output")}
        is_file = isinstance(self.reward, Path)
        reward = f"path: {in_yaml(str(self.reward))}" if is_file else f"name: {self.reward} # built in"
        keys = "".join(f"\n  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in self.data_keys.items())
        return TEMPLATE.format(
            **(GPU if self.num_gpus else cpu),
            **sizes,
            **limits,
            **paths,
            nnodes=nnodes,
            launcher="" if nnodes > 1 else "\n  launcher: local # all ranks on this machine; ray: also on others",
            reward=reward,
            data_keys=keys,
            lr=TINY_LR if self.is_tiny else SMALL_LR if self.is_small else LR,
        )


def in_yaml(text: str) -> str:
    """Return a path as a value of YAML: in quotes where its characters have another meaning there."""
    return text if PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
