"""Every family in every kind of layout: what goes in is what transformers has, and what comes out is what went in.

One start of the processes checks logits, generation through the hybrid engine, and the untouched model's export.

Every layout is compared with transformers, so a layout of several axes proves each of them: the argument is that of
`tests/parity`, for which it does not matter what a family's parts are, but for how
its tensors are cut, which is the family's own and is what may be wrong here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from rollout_checks import GREEDY, hugging_face_greedy, round_trip, tokens
from safetensors.torch import load_file
from sweeps import marks_of
from tiny_gemma4 import save_gemma4, save_gemma4_with_keys_for_values
from tiny_glm import save_glm4_moe_lite
from tiny_gpt_oss import save_gpt_oss
from tiny_minimax import save_minimax
from tiny_models import (
    random_batch,
    run_config,
    save_deepseek_v2,
    save_deepseek_v3,
    save_gemma2,
    save_gemma3,
    save_glm4_moe,
    save_llama,
    save_llama31,
    save_mistral,
    save_mixtral,
    save_moonlight,
    save_qwen2,
    save_qwen2_moe,
    save_qwen2_with_windows,
    save_qwen3,
    save_qwen3_moe,
    save_qwen3_moe_with_dense_layers,
)
from tiny_moonshot import save_kimi_k2
from tiny_qwen3_5 import save_qwen3_5, save_qwen3_5_moe, save_qwen3_next

from megatron_rl.columns import SCORING
from megatron_rl.controller.report import hf_sampled_logits
from megatron_rl.planning.model_folder import read_model_folder

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS = 7
MAX_SHARD_BYTES = 400_000
"""About a third of a tiny model, and less than a pipeline stage."""

GEMMA4 = (save_gemma4, save_gemma4_with_keys_for_values)
DENSE = (
    save_llama,
    save_llama31,
    save_qwen2,
    save_qwen3,
    save_mistral,
    save_gemma2,
    save_gemma3,
    *GEMMA4,
    save_qwen3_5,
)
LATENT = (save_deepseek_v2, save_deepseek_v3, save_moonlight, save_kimi_k2, save_glm4_moe_lite)
WITH_EXPERTS = (save_qwen3_moe, save_mixtral, save_qwen2_moe, save_qwen3_moe_with_dense_layers, save_glm4_moe, *LATENT)
WITH_EXPERTS += (save_gpt_oss, save_minimax, save_qwen3_5_moe, save_qwen3_next)
LAYOUTS = {
    "one process": (1, 1, 1, {}),
    "TP2": (2, 2, 1, {}),
    "PP2": (2, 1, 2, {}),
    "TP2xPP2": (4, 2, 2, {}),
    "EP2": (2, 1, 1, {"expert_model_parallel_size": 2}),
}
OFTEN = (
    (save_llama, "TP2xPP2"),
    (save_mixtral, "TP2"),
    (save_qwen2_moe, "EP2"),
    (save_deepseek_v2, "PP2"),
    (save_gemma3, "PP2"),
    (save_gpt_oss, "TP2"),
    (save_gemma4_with_keys_for_values, "PP2"),
)
"""What `make test` goes through: what families are built of (biases, shared experts, latent attention, windows,
sinks), and every layout, dense and with experts. Qwen2, Qwen3 and Qwen3-MoE are in `test_hybrid_engine.py`,
`tests/parity`, `test_transitions.py` and `test_export.py`; the tensors of every family in tests/model.
"""
OF_EACH_PART = (
    save_llama31,
    save_qwen3_moe_with_dense_layers,
    save_gemma2,
    save_deepseek_v3,
    save_glm4_moe,
    save_gpt_oss,
    save_minimax,
    save_gemma4_with_keys_for_values,
    save_qwen3_5_moe,
)
SPREAD = (save_gpt_oss, save_minimax, save_qwen3_5_moe)
SWEPT = [(save, "TP2xPP2") for save in OF_EACH_PART] + [(save, "EP2") for save in SPREAD]
"""What the sweeps have: each part in one family, cut along all axes, and each layout of experts' weights spread."""
NEWER = (
    *(save_gpt_oss, save_minimax, *GEMMA4, save_kimi_k2, save_glm4_moe_lite),
    *(save_qwen3_5, save_qwen3_5_moe, save_qwen3_next),
)
WEEKLY_CASES = [(save, layout) for save in NEWER for layout in LAYOUTS if save in WITH_EXPERTS or layout != "EP2"]
WEEKLY_CASES += [(save, "TP2xPP2") for save in (*DENSE, *WITH_EXPERTS)] + [(save, "EP2") for save in WITH_EXPERTS]
WEEKLY_CASES += [(save_llama31, "one process"), (save_qwen2_with_windows, "PP2")]
"""What runs once a week, but for the cases above: every family cut along all of its axes and its experts spread, the
newer ones in all layouts. Other families of the sweeps have their parts.
"""
CASES = [
    pytest.param(*case, marks=marks_of(case, OFTEN, set(WEEKLY_CASES) - {*SWEPT}), id=f"{case[0].__name__}-{case[1]}")
    for case in dict.fromkeys([*OFTEN, *SWEPT, *WEEKLY_CASES])
]


@dataclass(frozen=True)
class Reference:
    """What transformers makes of a folder."""

    path: str
    greedy: list[list[int]]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Callable[[Callable], Reference]:
    """The reference of a model by its recipe, made once."""
    known: dict[Callable, Reference] = {}

    def of(save: Callable) -> Reference:
        if save not in known:
            path = save(tmp_path_factory.mktemp("model"))
            logits = hf_sampled_logits(Path(path), random_batch(NUM_ROWS).read_by(SCORING))
            known[save] = Reference(path, hugging_face_greedy(path), logits)
        return known[save]

    return of


def through_the_engine(config, exported: Path) -> dict:
    """What one rank knows of an untouched model: its logits, its greedy answers; and the export."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    generations, _ = round_trip(worker, GREEDY)
    worker.roles["actor"].export_hf(exported, max_shard_bytes=MAX_SHARD_BYTES)
    rows = random_batch(NUM_ROWS)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    return {
        "greedy": tokens(generations),
        "dp_rank": worker.groups.dp_rank,
        "logits": worker.roles["actor"].sampled_logits(rows.read_by(SCORING)),
    }


@pytest.mark.parametrize(("save", "layout"), CASES)
def test_family_goes_in_and_comes_out(save, layout, reference, tmp_path) -> None:
    """Logits within 2e-5, tokens and bytes equal. Would not catch what only long rows or an update show."""
    expected = reference(save)
    world_size, tp_size, pp_size, sizes = LAYOUTS[layout]
    if save in WITH_EXPERTS and tp_size > 1:
        sizes = sizes | {"sequence_parallel": True}
    keys = {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in sizes.items()}
    keys["actor_rollout_ref__rollout__tensor_model_parallel_size"] = tp_size
    config = run_config(expected.path, tp_size, pp_size, **keys)
    ranks = run_ranks(world_size, through_the_engine, config, tmp_path / "exported")
    assert all(rank["greedy"] == expected.greedy for rank in ranks)
    scored = [rank for rank in ranks if rank["logits"] is not None]
    assert len(scored) == world_size // pp_size
    for rank in scored:
        wanted = rows_of(expected.logits, rank["dp_rank"], dp_size=world_size // (tp_size * pp_size))
        assert (rank["logits"] - wanted).abs().max() < 2e-5
    assert_same_folder(tmp_path / "exported", Path(expected.path))


def rows_of(logits: torch.Tensor, dp_rank: int, dp_size: int) -> torch.Tensor:
    """The part of the reference's logits that belongs to the rows of a data-parallel rank."""
    by_row = logits.split(random_batch(NUM_ROWS).num_sampled.tolist())
    return torch.cat(by_row[dp_rank::dp_size])


def assert_same_folder(exported: Path, original: Path) -> None:
    """The same tensors to the last bit, in several files, in the dtype that config.json says; a run starts from it."""
    assert read_model_folder("model", str(exported))[1] == []
    files = sorted(file.name for file in exported.glob("*.safetensors"))
    weight_map = json.loads((exported / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(files) > 2 and set(weight_map.values()) == set(files)
    found = {}
    for file in files:
        tensors = load_file(exported / file)
        assert set(tensors) == {name for name, where in weight_map.items() if where == file}
        found |= tensors
    before = load_file(original / "model.safetensors")
    assert found.keys() == before.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, found[name])] == []
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float32"
