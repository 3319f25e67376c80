"""A tiny random Kimi-K2, whose config.json is written as it is published."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_models import save_deepseek_v3

KIMI_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def save_kimi_k2(folder: Path, **changes) -> str:
    """A DeepSeek-V3 of one group of experts, under a model_type that transformers does not know."""
    path = save_deepseek_v3(
        folder,
        **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
        | {"rope_parameters": {**KIMI_YARN, "rope_type": "yarn", "rope_theta": 50_000.0}}
        | changes,
    )
    file = Path(path, "config.json")
    settings = json.loads(file.read_text())
    del settings["rope_parameters"]
    own = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "scoring_func": "sigmoid"}
    own |= {"topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0}
    file.write_text(
        json.dumps(settings | own | {"model_type": "kimi_k2", "rope_scaling": KIMI_YARN, "rope_theta": 50_000.0})
    )
    return path
