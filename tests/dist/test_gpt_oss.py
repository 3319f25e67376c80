"""gpt-oss beyond what all families have: folders in 4 bits, padded rows, log-probs after updates, adapters, 8 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from rollout_checks import GREEDY, RANDOM, hugging_face_greedy, logprob_difference, round_trip, tokens
from safetensors.torch import load_file
from test_adapter_parity import LINEARS, Oracle, check, run_adapted
from test_layout_parity import NUM_ROWS
from tiny_gpt_oss import save_gpt_oss, save_gpt_oss_in_4_bits, unpack_by_transformers
from tiny_models import random_batch, run_config

from megatron_rl.checkpoint.hf_folder import was_quantised
from megatron_rl.columns import ACTOR_UPDATE, SCORING
from megatron_rl.controller.report import hf_sampled_logits

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 2)])
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


def padded_logits(config) -> torch.Tensor | None:
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    return worker.roles["actor"].sampled_logits(random_batch(NUM_ROWS).read_by(SCORING))


@pytest.mark.exhaustive
def test_padded_rows_have_the_logits_of_packed_ones(tmp_path) -> None:
    """Both within 2e-5 of transformers. Would not catch rows that are longer than these."""
    path = save_gpt_oss(tmp_path)
    expected = hf_sampled_logits(Path(path), random_batch(NUM_ROWS).read_by(SCORING))
    for packed in (True, False):
        config = run_config(path, 1, 1, actor_rollout_ref__model__use_remove_padding=packed)
        (logits,) = run_ranks(1, padded_logits, config)
        assert (logits - expected).abs().max() < 2e-5


def differences(config) -> list[float | None]:
    """Largest log-prob difference of engine and trainer over samples, before an update and after."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    found = [logprob_difference(worker, round_trip(worker, RANDOM)[0])]
    rows = random_batch(NUM_ROWS)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    rows.add(old_log_probs=rows["advantages"].clone())
    worker.roles["actor"].update(rows.read_by(ACTOR_UPDATE))
    return [*found, logprob_difference(worker, round_trip(worker, RANDOM)[0])]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        ((1, 1, 1), {}),
        ((4, 2, 2), SP),
        ((2, 2, 1), SP | {"actor_rollout_ref__rollout__tensor_model_parallel_size": 1}),
        ((2, 1, 1), {"actor_rollout_ref__rollout__tensor_model_parallel_size": 2}),
    ],
)
def test_engine_and_trainer_agree_before_and_after_an_update(ranks, changes, tmp_path) -> None:
    """Log-probs within 5e-5, with the bias of partial sums on one rank or on several. Would not catch a rare tie."""
    world_size, tp_size, pp_size = ranks
    keys = {"actor_rollout_ref__rollout__tensor_model_parallel_size": tp_size} | changes
    config = run_config(save_gpt_oss(tmp_path), tp_size, pp_size, actor_rollout_ref__actor__optim__lr=0.02, **keys)
    found = [rank for rank in run_ranks(world_size, differences, config) if rank[0] is not None]
    assert found and max(max(rank) for rank in found) < 5e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [1, 2])
def test_adapters_of_attention_equal_peft(world_size, tmp_path) -> None:
    """Before an update and after one; no linear of experts has an adapter, so none has to be excluded."""
    oracle = Oracle(save_gpt_oss(tmp_path / "model"), tmp_path / "peft", LINEARS[:4])
    oracle.excluded = []
    check(run_adapted(oracle, world_size, world_size, 1, **(SP_OF_ACTOR if world_size > 1 else {})), oracle)


SP_OF_ACTOR = {"actor__megatron__sequence_parallel": True, "rollout__tensor_model_parallel_size": 2}
