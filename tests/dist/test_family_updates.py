"""Families with windows, bounds, norms after parts: gradients, updates in several layouts, generation after one."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from rollout_checks import GREEDY, RANDOM, hugging_face_greedy, logprob_difference, round_trip, tokens
from safetensors.torch import load_file, save_file
from sweeps import marks_of
from test_layout_parity import NUM_ROWS, assert_same, relative, run_layout, whole_weights
from test_moe_parity import EP2, ETP1, SP, hugging_face_gradients, policy_gradients
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
    save_qwen2,
)
from tiny_vision import save_qwen3_vl

from megatron_rl.columns import ACTOR_UPDATE

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

VPP2 = {"virtual_pipeline_model_parallel_size": 2}
FULL = {
    "override_transformer_config__recompute_granularity": "full",
    "override_transformer_config__recompute_method": "uniform",
    "override_transformer_config__recompute_num_layers": 1,
}
LAYOUTS = {
    save_gemma2: {"TP2, PP2, VPP2, SP": ((4, 2, 2), SP | VPP2), "PP2, made again": ((2, 1, 2), FULL)},
    save_gemma3: {"TP2, PP2, VPP2": ((4, 2, 2), VPP2), "DP2, PP2": ((4, 1, 2), {})},
    save_glm4_moe: {
        "TP2, PP2, EP2, ETP1": ((4, 2, 2), SP | EP2 | ETP1),
        "CP2": ((2, 1, 1), {"context_parallel_size": 2}),
    },
    save_minimax: {
        "TP2, PP2, EP2, ETP1": ((4, 2, 2), SP | EP2 | ETP1),
        "TP2, PP2, made again": ((4, 2, 2), SP | FULL),
        "CP2": ((2, 1, 1), {"context_parallel_size": 2}),
    },
    save_gpt_oss: {
        "TP2, PP2, EP2, ETP1": ((4, 2, 2), SP | EP2 | ETP1),
        "TP2, PP2, made again": ((4, 2, 2), SP | FULL),
    },
}
SAVED = tuple(LAYOUTS)
BOUNDS = {save_gpt_oss: 1e-5, save_minimax: 1e-5}
"""Of gradients, relative to the largest element; 1e-4 for others."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("save", SAVED)
def test_gradients_equal_hugging_face(save, tmp_path) -> None:
    """Every parameter's, before clipping, in one process, with a window shorter than rows. Would not catch errors of
    splitting: layouts do.
    """
    path = save(tmp_path)
    ours = whole_weights(run_ranks(1, policy_gradients, run_config(path, 1, 1)), "actor", path)
    expected = hugging_face_gradients(path)
    assert ours.keys() - {"lm_head.weight"} == expected.keys() - {"lm_head.weight"}
    idle = [name for name in ours if not expected[name].any()]
    assert len({name.rpartition(".experts.")[2].split(".")[0] for name in idle}) <= 1
    for name, gradient in ours.items():
        assert not gradient.any() if name in idle else relative(gradient, expected[name]) < BOUNDS.get(save, 1e-4), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("save", SAVED)
def test_layouts_equal_one_process(save, tmp_path) -> None:
    """Scores, gradient norms and an update, of actor and critic. Would not catch an error in one process, too."""
    path = save(tmp_path)
    reference = run_layout(path, 1, 1, 1)
    for ranks, sizes in LAYOUTS[save].values():
        assert_same(run_layout(path, *ranks, **sizes), reference, path)


def before_and_after(config, exported: Path) -> list[list[list[int]]]:
    """Greedy answers through the engine before an update and after, and the updated model as a folder."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    before, _ = round_trip(worker, GREEDY)
    rows = random_batch(NUM_ROWS)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    rows.add(old_log_probs=rows["advantages"].clone())
    worker.roles["actor"].update(rows.read_by(ACTOR_UPDATE))
    after, _ = round_trip(worker, GREEDY)
    worker.roles["actor"].export_hf(exported)
    return [tokens(before), tokens(after)]


def assert_same_answers(path: str, exported: Path) -> None:
    """Greedy answers of TP2 x PP2 before an update and after are transformers' own, and not the same."""
    keys = {"actor_rollout_ref__actor__optim__lr": 0.02, "actor_rollout_ref__actor__megatron__sequence_parallel": True}
    ranks = run_ranks(4, before_and_after, run_config(path, 2, 2, **keys), exported)
    before, after = hugging_face_greedy(path), hugging_face_greedy(str(exported))
    assert all(rank == [before, after] for rank in ranks)
    assert before != after


@pytest.mark.parametrize(
    "save", [pytest.param(save, marks=marks_of(save, weekly={*SAVED} - {save_gemma2})) for save in SAVED]
)
def test_generation_before_and_after_an_update(save, tmp_path) -> None:
    """TP2 x PP2, greedily, against transformers on what goes in and what comes out. Weekly but for Gemma-2: experts
    after an update are in `test_transitions.py`. Would not catch a rare tie.
    """
    assert_same_answers(save(tmp_path / "model"), tmp_path / "exported")


def save_qwen2_with_copied_head(folder: Path, **changes) -> str:
    """A Qwen2 whose folder has the head, too, as some tools write it."""
    return copy_head(save_qwen2(folder, **changes))


def save_qwen3_vl_with_copied_head(folder: Path, **changes) -> str:
    """A Qwen3-VL with tied embeddings, whose folder has the head, too: vLLM has it inside of the language model."""
    return copy_head(save_qwen3_vl(folder, **changes))


def copy_head(path: str) -> str:
    """Add the embedding to a saved model's weights again, as the head."""
    file = Path(path, "model.safetensors")
    tensors = load_file(file)
    (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    save_file(tensors | {"lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    return path


WITH_OWN_HEAD = (save_deepseek_v3, save_qwen2_with_copied_head, save_qwen3_vl_with_copied_head)
"""Models for which vLLM builds a head, even where config.json ties it to the embedding."""
FURTHER = (save_glm4_moe, save_glm4_moe_lite, save_deepseek_v2, save_minimax, save_gpt_oss)


@pytest.mark.parametrize(
    "save", [pytest.param(save, marks=marks_of(save, weekly=FURTHER)) for save in (*WITH_OWN_HEAD, *FURTHER)]
)
def test_the_engines_own_head_is_the_embedding_of_a_tied_model(save, tmp_path) -> None:
    """Greedy answers before an update and after. Would not catch a further family of this kind."""
    assert_same_answers(save(tmp_path / "model", tie_word_embeddings=True), tmp_path / "exported")


def difference(config) -> float | None:
    """Largest log-prob difference of engine and trainer over samples."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    generations, _ = round_trip(worker, RANDOM)
    return logprob_difference(worker, generations)


@pytest.mark.exhaustive
def test_routers_that_the_engine_would_keep_in_float32(tmp_path) -> None:
    """GLM-4.5 in bfloat16: the engine reads the trainer's routers, and agrees with it as bfloat16 does.

    Would not catch what only a GPU's kernels do.
    """
    # vLLM's kernels for bfloat16 on CPUs want sizes that are multiples of 32.
    path = save_glm4_moe(tmp_path, head_dim=64, moe_intermediate_size=64)
    (found,) = run_ranks(1, difference, run_config(path, 1, 1, actor_rollout_ref__actor__megatron__dtype="bfloat16"))
    assert found is not None and 1e-5 < found < 0.3
