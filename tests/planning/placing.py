"""Small runs to place, a model folder of any size and GPUs of any memory; and all placements of a run."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.roles import ACTOR as ACTOR_ROLE
from megatron_rl.config.roles import ROLLOUT as ROLLOUT_ROLE
from megatron_rl.planning.hardware import Hardware, load_hardware
from megatron_rl.planning.layout_search.partitions import partitions
from megatron_rl.planning.layout_search.pools import PoolChoice, Pools
from megatron_rl.planning.layout_search.request import MapRequest, read_base
from megatron_rl.planning.layout_search.search_problem import ClusterSize, Keeps, SearchProblem

REPOSITORY = Path(__file__).parents[2]
MODELS = REPOSITORY / "configs" / "models"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 12,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
FILE = """
data: {train_files: a.parquet, val_files: b.parquet, train_batch_size: 64, max_prompt_length: 256}
actor_rollout_ref: {actor: {ppo_mini_batch_size: 16, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 4096}}
trainer: {device: cuda, total_training_steps: 1}
"""


def gpu(memory_gb: float = 85.0, **changes: float) -> Hardware:
    """An H100 with other memory, half a gigabyte of which is the context's."""
    return dataclasses.replace(load_hardware("h100"), memory_bytes=memory_gb * 1e9, context_bytes=0.5e9, **changes)


def write_model(folder: Path, **changes: object) -> Path:
    """config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    return folder


def reward_model_like(folder: Path, model: Path) -> Path:
    """A reward model with the trunk of another model."""
    settings = json.loads((model / "config.json").read_text())
    return write_model(folder, **settings | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1})


def request(
    folder: Path,
    gpus: int,
    *keep: str,
    model: Path | None = None,
    critic: Path | None = None,
    reward: Path | None = None,
    hardware: Hardware | None = None,
    per_node: int = 8,
    lengths: tuple[float, float] = (128.0, 128.0),
    file: str = FILE,
) -> MapRequest:
    """Of a configuration in `folder`. reward: None is no reward model."""
    path = folder / "run.yaml"
    path.write_text(file)
    model = model or write_model(folder / "model")
    texts = [f"actor_rollout_ref.model.path={model}", *keep]
    texts += [f"critic.model.path={critic}"] if critic else []
    texts += [f"reward_model.model.path={reward}", "reward_model.enable=true"] if reward else []
    reading, config, kept = read_base(path, texts)
    values = {key: value for key, value in kept.values.items() if any(text.startswith(f"{key}=") for text in keep)}
    node = min(per_node, gpus)
    return MapRequest(
        path,
        tuple(texts),
        reading.settings,
        config,
        hardware or gpu(),
        ClusterSize(gpus // node, node),
        Keeps(values),
        lengths,
        per_node,
    )


def enumerated(work: SearchProblem) -> Iterator[float]:
    """Seconds of every partition, allocation and layout, in the manner of HybridFlow's Algorithm 1 (arXiv:2409.19256):
    no bounds, no dominance, no dynamic programming.
    """
    pools, cluster = Pools(work), work.cluster
    made: dict[tuple[tuple[str, ...], int], list[PoolChoice]] = {}

    def choices(block: tuple[str, ...], units: int) -> list[PoolChoice]:
        if (block, units) not in made:
            made[block, units] = list(pools.choices(block, units))
        return made[block, units]

    for partition in partitions(work.names):
        for sizes in itertools.product(cluster.sizes, repeat=len(partition)):
            if sum(sizes) > cluster.num_units:
                continue
            for found in itertools.product(*map(choices, partition, sizes)):
                yield step_of(found)


def step_of(choices: tuple[PoolChoice, ...]) -> float:
    """Pools side by side in each round."""
    reshard = max(c.reshard for c in choices if ACTOR_ROLE in c.block or ROLLOUT_ROLE in c.block)
    gen = sum(c.gen for c in choices)
    return reshard + gen + max(c.score for c in choices) + max(c.update for c in choices)
