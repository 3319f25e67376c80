"""gpt-oss and MiniMax-M2 beyond what all families have: folders in 4 bits, and adapters of attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft_oracle import LINEARS, Oracle, check, run_adapted
from ranks import run_ranks
from rollout_checks import GREEDY, hugging_face_greedy, round_trip, tokens
from safetensors.torch import load_file
from sweeps import WEEKLY
from tiny_gpt_oss import save_gpt_oss, save_gpt_oss_in_4_bits, unpack_by_transformers
from tiny_minimax import save_minimax
from tiny_models import random_batch, run_config
from updates import NUM_ROWS

from megatron_rl.checkpoint.hf_folder import was_quantised
from megatron_rl.columns import SCORING
from megatron_rl.controller.report import hf_sampled_logits

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

ACTOR_KERNELS = "actor_rollout_ref__actor__megatron__attention_kernels"
SP = {"actor_rollout_ref__actor__megatron__sequence_parallel": True}


def in_and_out(config, exported: Path) -> dict:
    """Logits and greedy answers of an untouched model, and its export."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    answers, _ = round_trip(worker, GREEDY)
    worker.roles["actor"].export_hf(exported)
    logits = worker.roles["actor"].sampled_logits(random_batch(NUM_ROWS).read_by(SCORING))
    return {"greedy": tokens(answers), "logits": logits}


@pytest.mark.parametrize(
    ("tp_size", "pp_size"), [pytest.param(1, 1, marks=WEEKLY), pytest.param(2, 2, marks=pytest.mark.exhaustive)]
)
def test_a_folder_in_4_bits_is_the_unpacked_one(tp_size, pp_size, tmp_path) -> None:
    """Logits within 2e-5 and tokens of transformers on the folder that transformers' own function unpacks; the export
    is that folder. Cuts of 48 columns end within a group of 32. Would not catch a number that no group here has.
    """
    path = save_gpt_oss_in_4_bits(tmp_path / "packed")
    plain = unpack_by_transformers(path, tmp_path / "plain", torch.float32)
    config = run_config(path, tp_size, pp_size, **(SP if tp_size > 1 else {}))
    ranks = run_ranks(tp_size * pp_size, in_and_out, config, tmp_path / "exported")
    expected, greedy = (
        hf_sampled_logits(Path(plain), random_batch(NUM_ROWS).read_by(SCORING)),
        hugging_face_greedy(plain),
    )
    for rank in ranks:
        assert rank["greedy"] == greedy
        assert rank["logits"] is None or (rank["logits"] - expected).abs().max() < 2e-5
    assert_unpacked(tmp_path / "exported", Path(plain), "float32")


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_a_folder_in_4_bits_comes_out_in_bfloat16(tmp_path) -> None:
    """To the byte, as bfloat16 holds every number of 4 bits. Would not catch an error that transformers has, too."""
    path = save_gpt_oss_in_4_bits(tmp_path / "packed")
    plain = unpack_by_transformers(path, tmp_path / "plain", torch.bfloat16)
    config = run_config(path, 1, 1, actor_rollout_ref__actor__megatron__dtype="bfloat16")
    run_ranks(1, in_and_out, config, tmp_path / "exported")
    assert_unpacked(tmp_path / "exported", Path(plain), "bfloat16")


def assert_unpacked(exported: Path, plain: Path, dtype: str) -> None:
    """The tensors of the unpacked folder to the last bit, and no word of 4 bits in config.json."""
    found, expected = load_file(exported / "model.safetensors"), load_file(plain / "model.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
    assert json.loads((exported / "config.json").read_text())["dtype"] == dtype
    assert not was_quantised(exported)


def logits_of(config) -> tuple[torch.Tensor, int]:
    """The logits of an untouched model, and how many of its layers FlexAttention computes."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    modules = [module for chunk in worker.roles["actor"].trainable.models for module in chunk.modules()]
    fused = [module for module in modules if getattr(getattr(module, "rows", None), "__name__", "") == "flex_rows"]
    return worker.roles["actor"].sampled_logits(random_batch(NUM_ROWS).read_by(SCORING)), len(fused)


@pytest.mark.exhaustive
def test_fused_kernels_compute_sinks_and_windows(tmp_path) -> None:
    """Logits of a whole model, padded and packed rows as a role makes them. Preflight keeps CPUs from it, which have no
    gradients; the gradients are in tests/model. Would not catch what a GPU's compiler makes of it.
    """
    path = save_gpt_oss(tmp_path / "model")
    found = [
        run_ranks(1, logits_of, run_config(path, 1, 1, **{ACTOR_KERNELS: kernels}))[0] for kernels in ("plain", "fused")
    ]
    assert found[0][1] == 0 and found[1][1] > 1
    assert (found[0][0] - found[1][0]).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("save", "world_size"),
    [
        pytest.param(save_gpt_oss, 1, marks=WEEKLY),
        pytest.param(save_gpt_oss, 2, marks=pytest.mark.exhaustive),
        pytest.param(save_minimax, 2, marks=WEEKLY),
    ],
)
def test_adapters_of_attention_equal_peft(save, world_size, tmp_path) -> None:
    """Before an update and after one. Of gpt-oss no linear of experts has an adapter, so none has to be excluded."""
    oracle = Oracle(save(tmp_path / "model"), tmp_path / "peft", LINEARS[:4])
    oracle.excluded = oracle.excluded if save is save_minimax else []
    check(run_adapted(oracle, world_size, world_size, 1, **(SP_OF_ACTOR if world_size > 1 else {})), oracle)


SP_OF_ACTOR = {"actor__megatron__sequence_parallel": True, "rollout__tensor_model_parallel_size": 2}
