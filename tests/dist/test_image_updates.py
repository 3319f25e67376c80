"""The engine beside the trainer on rows with images, before and after an update."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from picture_rows import ImageRow, features_of, loaded, request, some_rows, want_placeholders
from ranks import run_ranks
from rollout_checks import RANDOM, logprob_difference
from sweeps import WEEKLY, marks_of
from tiny_models import run_config
from vision_folders import (
    IMAGE,
    VIDEO,
    save_qwen3_5_moe_vl_folder,
    save_qwen3_5_vl_folder,
    save_qwen3_vl_folder,
    save_qwen3_vl_moe_folder,
    save_qwen25_vl_folder,
)

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.records import Batch, ragged, ragged_from_lengths, single_turn
from megatron_rl.rollout.slices import Drawn, Slice

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

LAYOUTS = {"one": (1, 1, 1, 1), "TP2": (2, 2, 1, 2), "TP2xPP2 to TP1": (4, 2, 2, 1)}
"""Ranks, TP and PP of the trainer, TP of the engine."""
SAVES = (
    save_qwen25_vl_folder,
    save_qwen3_vl_folder,
    save_qwen3_vl_moe_folder,
    save_qwen3_5_vl_folder,
    save_qwen3_5_moe_vl_folder,
)
CASES = [(save, layout) for save in SAVES for layout in LAYOUTS]
OFTEN = [(save_qwen25_vl_folder, "one")]
FURTHER = [case for case in CASES if case[1] != "TP2xPP2 to TP1" or case[0] not in SAVES[:2]]


def trained_rows(rows: Sequence[ImageRow], drawn: Sequence[Drawn], features: dict[str, torch.Tensor]) -> Batch:
    """The rows with their responses, as the roles read them."""
    ids = [torch.tensor([*row.token_ids, *new.token_ids]) for row, new in zip(rows, drawn, strict=True)]
    lengths = torch.tensor([len(new.token_ids) for new in drawn])
    sampled = torch.cat([torch.tensor(new.log_probs) for new in drawn])
    generator = torch.Generator().manual_seed(1)
    columns = {name: torch.randn(len(sampled), generator=generator) for name in ("advantages", "returns", "old_values")}
    pictures = [picture for row in rows for picture in row.pictures]
    counts = torch.tensor([len(row.pieces) for row in rows])
    tokens = torch.tensor([sum(piece.num_tokens for piece in row.pieces) for row in rows])
    images = {
        "image_grids": ragged_from_lengths(torch.tensor([picture.grid for picture in pictures]), counts),
        "image_features": ragged_from_lengths(torch.cat([features[picture.digest] for picture in pictures]), tokens),
        "image_pieces": ragged_from_lengths(
            torch.tensor([piece.numbers for row in rows for piece in row.pieces]), counts
        ),
    }
    columns |= {"rollout_log_probs": sampled, "old_log_probs": sampled}
    given = {name: ragged_from_lengths(values, lengths) for name, values in columns.items()}
    return single_turn(ragged(ids), lengths, **given, **images)


def drawn_and_trained(config, rows: Sequence[ImageRow], features: dict[str, torch.Tensor]) -> dict:
    """What one rank draws before and after an update, and how far the trainer's log-probs are from the engine's."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    rollout = worker.roles["rollout"]

    def draw(version: int) -> Batch:
        rollout.enter()
        starts = tuple(request(number, row, features, RANDOM) for number, row in enumerate(rows))
        drawn, _ = rollout.generator.advance(Slice(version, None, starts))
        rollout.exit()
        return trained_rows(rows, [drawn[number] for number in range(len(rows))], features)

    first = draw(0)
    known = {"difference": logprob_difference(worker, first)}
    worker.roles["actor"].update(first.read_by(ACTOR_UPDATE))
    second = draw(1)
    known["difference after"] = logprob_difference(worker, second)
    known["ids"], known["ids after"] = (
        [row.tolist() for row in batch["input_ids"].unbind()] for batch in (first, second)
    )
    return known


@pytest.mark.parametrize(
    ("save", "layout"), [pytest.param(*case, marks=marks_of(case, OFTEN, FURTHER)) for case in CASES]
)
def test_engine_and_trainer_read_images_alike(save, layout, tmp_path) -> None:
    """Log-probs within 5e-5 before and after an update that changes them, with a head that wants placeholders. Would
    not catch features that both sides read wrongly.
    """
    path = want_placeholders(save(tmp_path / "model"))
    model = loaded(path)
    rows = some_rows(model)
    features = features_of(model, [picture for row in rows for picture in row.pictures])
    world_size, tp_size, pp_size, engine_tp = LAYOUTS[layout]
    keys = {"actor_rollout_ref__rollout__tensor_model_parallel_size": engine_tp, "data__image_key": "images"}
    keys["actor_rollout_ref__actor__megatron__sequence_parallel"] = tp_size > 1
    config = run_config(path, tp_size, pp_size, actor_rollout_ref__actor__optim__lr=1e-3, **keys)
    ranks = run_ranks(world_size, drawn_and_trained, config, rows, features)
    for after in ("", " after"):
        differences = [rank[f"difference{after}"] for rank in ranks if rank[f"difference{after}"] is not None]
        assert differences and max(differences) < 5e-5
        assert all(rank[f"ids{after}"] == ranks[0][f"ids{after}"] for rank in ranks)
        prompts = [len(row.token_ids) for row in rows]
        responses = [ids[length:] for ids, length in zip(ranks[0][f"ids{after}"], prompts, strict=True)]
        assert not {IMAGE, VIDEO}.intersection(token for response in responses for token in response)
    assert ranks[0]["ids"] != ranks[0]["ids after"]


def features_now(worker, rows: Sequence[ImageRow]) -> dict[str, torch.Tensor]:
    """Digest -> features by the trained tower of the ranks as it is now, on every rank."""
    pictures = list({picture.digest: picture for row in rows for picture in row.pictures}.values())
    given = Batch(
        image_grids=ragged_from_lengths(
            torch.tensor([picture.grid for picture in pictures]), torch.ones(len(pictures), dtype=torch.int64)
        ),
        image_patches=ragged_from_lengths(
            torch.cat([picture.patches for picture in pictures]),
            torch.tensor([len(picture.patches) for picture in pictures]),
        ),
    )
    made = worker.roles["actor"].policy_features(given)
    every: list = [None] * worker.groups.grid.world_size
    torch.distributed.all_gather_object(every, None if made is None else made["policy_features"].unbind())
    whole = next(one for one in every if one is not None)
    return {picture.digest: one for picture, one in zip(pictures, whole, strict=True)}


def with_trained_tower(config, rows: Sequence[ImageRow], is_stale: bool) -> dict:
    """As `drawn_and_trained`, where the tower is trained. is_stale: the engine keeps what it has read of images."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.rollout import engine, in_flight_requests

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    rollout = worker.roles["rollout"]
    if is_stale:
        engine.forget_prefixes = in_flight_requests.forget_prefixes = lambda llm: llm.reset_prefix_cache()

    def draw(version: int) -> Batch:
        features = features_now(worker, rows)
        rollout.enter()
        starts = tuple(request(number, row, features, RANDOM) for number, row in enumerate(rows))
        drawn, _ = rollout.generator.advance(Slice(version, None, starts))
        rollout.exit()
        batch = trained_rows(rows, [drawn[number] for number in range(len(rows))], features)
        batch.add(policy_features=batch["image_features"])
        return batch.without("image_features")

    first = draw(0)
    known = {"difference": logprob_difference(worker, first)}
    patches = [torch.cat([torch.empty(0, patch_width(rows)), *(p.patches for p in row.pictures)]) for row in rows]
    first.add(image_patches=ragged_from_lengths(torch.cat(patches), torch.tensor([len(one) for one in patches])))
    before = features_now(worker, rows)
    worker.roles["actor"].update(first.read_by(ACTOR_UPDATE))
    after = features_now(worker, rows)
    known["moved"] = max(float((after[digest] - before[digest]).abs().max()) for digest in before)
    known["difference after"] = logprob_difference(worker, draw(1))
    return known


def patch_width(rows: Sequence[ImageRow]) -> int:
    return next(row.pictures[0].patches.shape[1] for row in rows if row.pictures)


TRAINED = [(save, layout, False) for save in SAVES[:2] for layout in LAYOUTS] + [(save_qwen25_vl_folder, "one", True)]


@pytest.mark.parametrize(("save", "layout", "is_stale"), [pytest.param(*case, marks=WEEKLY) for case in TRAINED])
def test_an_engine_reads_what_the_trained_tower_makes(save, layout, is_stale, tmp_path) -> None:
    """Log-probs within 5e-5 before and after an update that moves features; an engine that keeps what it has read of
    images before differs by more. Would not catch features that both sides make wrongly.
    """
    path = save(tmp_path / "model")
    rows = some_rows(loaded(path))
    world_size, tp_size, pp_size, engine_tp = LAYOUTS[layout]
    keys = {"actor_rollout_ref__rollout__tensor_model_parallel_size": engine_tp, "data__image_key": "images"}
    keys["actor_rollout_ref__actor__megatron__sequence_parallel"] = tp_size > 1
    keys["actor_rollout_ref__actor__megatron__freeze_vision_model"] = False
    config = run_config(path, tp_size, pp_size, actor_rollout_ref__actor__optim__lr=1e-3, **keys)
    ranks = run_ranks(world_size, with_trained_tower, config, rows, is_stale)
    before, after = (
        max(rank[name] for rank in ranks if rank[name] is not None) for name in ("difference", "difference after")
    )
    assert before < 5e-5 and min(rank["moved"] for rank in ranks) > 1e-3
    assert after > 1e-3 if is_stale else after < 5e-5
