"""Rows with images: features of the folder's own tower in the trainer's passes, next to transformers on the pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from gradients import gradients_on_disk, policy_gradients
from layout_keys import of_actor
from ranks import run_ranks
from scenarios import ALONE, Runs, Scenario
from tiny_models import run_config
from updates import assert_same, collected, one_update, relative, run_layout, whole_weights
from vision_folders import FIRST_BYTE, FIRST_COLOUR, IMAGE, VISION_END, VISION_START

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.images import ImagePiece, digest_of_image
from megatron_rl.model.families import ImageForm, image_form, inside_of
from megatron_rl.planning.memory import plan_stages
from megatron_rl.planning.run_models import RunModels
from megatron_rl.records import Batch, ragged, ragged_from_lengths, single_turn

READS = {"data__image_key": "images"}
TRAINED = {"actor_rollout_ref__actor__megatron__freeze_vision_model": False}
TOWER = "actor vision tower"
GRIDS = ((1, 4, 6), (1, 2, 2), (1, 8, 4))
IN_ROWS = ((), (0,), (0, 1, 2), (0,), (2,), (), (1, 2), (0, 1, 2), (2,))
"""The images of each row. Rows 1 and 3, and 2 and 7, have equal prompts; row 8 has that of row 4 with another image."""
SAME = {3: 1, 7: 2, 8: 4}
ALL_ROWS = tuple(range(len(IN_ROWS)))


def patches_of(form: ImageForm, number: int) -> torch.Tensor:
    """The patches of an image, float32 [t * h * w, values]; from 3 on the same grids have other images."""
    rows = torch.tensor(GRIDS[number % 3]).prod()
    return torch.randn(int(rows), form.patch_values, generator=torch.Generator().manual_seed(number))


def images_of(row: int) -> list[int]:
    """Numbers of a row's images."""
    return [number + 3 * (row == 8) for number in IN_ROWS[row]]


def image_rows(form: ImageForm) -> Batch:
    """Nine rows of text, of one and of several images of different sizes, without their features."""
    generator = torch.Generator().manual_seed(0)

    def text(number: int) -> torch.Tensor:
        return torch.randint(FIRST_BYTE, FIRST_COLOUR, (number,), generator=generator)

    prompts: list[torch.Tensor] = []
    rows, lengths, pieces = [], [], []
    for row, numbers in enumerate(IN_ROWS):
        parts, places = [text(3 + row % 4)], []
        for number in numbers:
            t, h, w = GRIDS[number]
            places.append(sum(map(len, parts)) + 1)
            marks = torch.tensor([VISION_START, *[IMAGE] * (t * h * w // form.merge**2), VISION_END])
            parts += [marks, text(2)]
        prompts.append(prompts[SAME[row]] if row in SAME else torch.cat(parts))
        if row in SAME:
            places = (prompts[-1] == VISION_START).nonzero().flatten().add(1).tolist()
        lengths.append(2 + row % 5)
        rows.append(torch.cat([prompts[-1], text(lengths[-1])]))
        found = [(digest_of_image(str(number).encode(), GRIDS[number % 3]), number) for number in images_of(row)]
        of_row = [
            ImagePiece(place, digest, GRIDS[number % 3], int(torch.tensor(GRIDS[number % 3]).prod()) // form.merge**2)
            for place, (digest, number) in zip(places, found, strict=True)
        ]
        pieces.append(torch.tensor([piece.numbers for piece in of_row], dtype=torch.int64).view(-1, 4))
    responses = torch.tensor(lengths)

    def noise() -> torch.Tensor:
        return ragged_from_lengths(torch.randn(int(responses.sum()), generator=generator), responses)

    names = ("rollout_log_probs", "old_values", "advantages", "returns")
    grids = [torch.tensor([GRIDS[number] for number in numbers], dtype=torch.int64).view(-1, 3) for numbers in IN_ROWS]
    counts = torch.tensor([len(one) for one in grids])
    return single_turn(
        ragged(rows),
        responses,
        image_grids=ragged_from_lengths(torch.cat(grids), counts),
        image_pieces=ragged_from_lengths(torch.cat(pieces), counts),
        **{name: noise() for name in names},
    )


def rows_with_features(worker: Any) -> Batch:
    """The rows on a rank, with the features that its folder's tower makes."""
    tower = worker.roles["actor"].source.vision_tower()
    batch = image_rows(tower.form)
    made = {
        number: tower.features(patches_of(tower.form, number), torch.tensor(GRIDS[number % 3])) for number in range(6)
    }
    width = made[0].shape[1]
    rows = [torch.cat([torch.empty(0, width), *(made[n] for n in images_of(row))]) for row in range(len(IN_ROWS))]
    batch.add(image_features=ragged_from_lengths(torch.cat(rows), torch.tensor([len(row) for row in rows])))
    return batch


def rows_with_patches(worker: Any) -> Batch:
    """`rows_with_features`, with what the trained tower of the ranks reads and makes."""
    batch = rows_with_features(worker)
    form = worker.roles["actor"].source.vision_tower().form
    patches = [
        torch.cat([torch.empty(0, form.patch_values), *(patches_of(form, number) for number in images_of(row))])
        for row in range(len(IN_ROWS))
    ]
    batch.add(image_patches=ragged_from_lengths(torch.cat(patches), torch.tensor([len(row) for row in patches])))
    batch.add(trained_columns(worker))
    return batch


def trained_columns(worker: Any) -> Batch:
    """`policy_features` of all rows by the tower of the ranks as it is now, on every rank."""
    actor = worker.roles["actor"]
    form = image_form(actor.source.folder.settings)
    assert form is not None
    images = [patches_of(form, number) for number in range(6)]
    grids = torch.tensor([GRIDS[number % 3] for number in range(6)])
    one_each = torch.ones(6, dtype=torch.int64)
    made = actor.policy_features(
        Batch(
            image_grids=ragged_from_lengths(grids, one_each),
            image_patches=ragged_from_lengths(torch.cat(images), torch.tensor([len(one) for one in images])),
        )
    )
    every: list[Any] = [None] * worker.groups.grid.world_size
    torch.distributed.all_gather_object(every, None if made is None else made["policy_features"].unbind())
    features = next(one for one in every if one is not None)
    width = features[0].shape[1]
    rows = [torch.cat([torch.empty(0, width), *(features[n] for n in images_of(row))]) for row in range(len(IN_ROWS))]
    return Batch(policy_features=ragged_from_lengths(torch.cat(rows), torch.tensor([len(row) for row in rows])))


def expected_log_probs(path: str, model: torch.nn.Module, rows: Sequence[int] = ALL_ROWS) -> torch.Tensor:
    """Log-prob of every response token of these rows under transformers' model on the pixels, where no placeholder can
    follow.
    """
    form = image_form(ModelFolder(path).settings)
    assert form is not None
    batch, expected = image_rows(form)[torch.tensor(rows)], []
    for row, ids, length in zip(rows, batch["input_ids"].unbind(), batch.num_sampled.tolist(), strict=True):
        given: dict[str, torch.Tensor] = {}
        if images_of(row):
            given["pixel_values"] = torch.cat([patches_of(form, number) for number in images_of(row)])
            given["image_grid_thw"] = torch.tensor([GRIDS[number % 3] for number in images_of(row)])
            given["mm_token_type_ids"] = (ids == IMAGE).int()[None]
        logits = model(input_ids=ids[None], use_cache=False, **given).logits[0, :-1]
        logits = logits.index_fill(-1, torch.tensor(form.unsampled), -torch.inf)
        expected.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[-length:, 0])
    return torch.cat(expected)


def by_transformers(
    path: str, *, trains_tower: bool = False, rows: Sequence[int] = ALL_ROWS
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs, and gradients of -mean(advantage * log-prob) of the language model's tensors, or of all."""
    from megatron_rl.controller.report import hf_model

    model, form = hf_model(path), image_form(ModelFolder(path).settings)
    assert form is not None
    model.model.visual.requires_grad_(trains_tower)
    log_probs = expected_log_probs(path, model, rows)
    (-log_probs * image_rows(form)[torch.tensor(rows)].flat("advantages")).mean().backward()
    inside = inside_of(model.config.architectures)
    assert inside is not None
    assert inside.tower is not None
    stacked = ".experts." if model.config.model_type == "qwen3_vl_moe" else None  # folders have other dims
    prefixes = {"model.language_model.": inside.folder_prefix, "model.visual.": inside.tower.prefix}
    gradients = {
        reduce(lambda name, known: name.replace(*known), prefixes.items(), name): (
            gradient.transpose(-1, -2) if stacked is not None and stacked in name else gradient
        )
        for name, gradient in gradients_on_disk(path, model).items()
        if trains_tower or "visual." not in name
    }
    return log_probs.detach(), gradients


@dataclass(frozen=True)
class ImageGradients:
    """Log-probs of rows with images, and gradients, are those of transformers; over several ranks those of one, too.

    Would not catch a tower that both build wrongly.
    """

    bound: float = 1e-5
    """Of a gradient, relative to its largest element; all together are within 1e-5 of their norm."""
    name: str = "image gradients"
    trains_tower: bool = False
    rows: tuple[int, ...] = ALL_ROWS
    """Those that are read, one half by each of two data-parallel ranks."""

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path = runs.path(scenario)
        found = self._gradients(path, scenario.ranks, {**scenario.common, **scenario.keys, **of_actor(scenario.sizes)})
        transformers = partial(by_transformers, path, trains_tower=self.trains_tower, rows=self.rows)
        log_probs, expected = runs.once((self.name, path), transformers)
        assert (collected(found, "log_probs") - log_probs).abs().max() < 2e-5
        ours = self._compared(found, path, expected)
        if scenario.ranks != ALONE:
            alone = runs.once((self.name, path, ALONE), lambda: self._gradients(path, ALONE, scenario.common))
            assert ours.keys() == self._compared(found, path, whole_weights(alone, "actor", path)).keys()
        squares = sum(gradient.square().sum() for gradient in expected.values())
        assert sum((ours[name] - expected[name]).square().sum() for name in ours) < 1e-5**2 * squares

    def _gradients(self, path: str, ranks: tuple[int, int, int], keys: Mapping[str, object]) -> list[dict]:
        trained, rows_of = (TRAINED, rows_with_patches) if self.trains_tower else ({}, rows_with_features)
        config = run_config(path, *ranks[1:], **READS, **trained, **keys)
        return run_ranks(ranks[0], partial(chosen_gradients, rows_of=rows_of, rows=self.rows), config)

    def _compared(self, found: list[dict], path: str, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return whole gradients, which are within the bound of these."""
        ours = whole_weights(found, "actor", path)
        assert ours.keys() - {"lm_head.weight"} == expected.keys() - {"lm_head.weight"}
        far = {name: relative(gradient, expected[name]) for name, gradient in ours.items()}
        assert max(far.values()) < self.bound, sorted(far.items(), key=lambda one: -one[1])[:4]
        return ours


def chosen_gradients(config: Any, rows_of: Callable[[Any], Batch], rows: Sequence[int]) -> dict:
    """`policy_gradients` of these rows."""
    return policy_gradients(config, lambda worker: rows_of(worker)[torch.tensor(rows)])


@dataclass(frozen=True)
class ImageUpdate:
    """Scores and an update of rows with images equal those of one process, and its log-probs those of transformers.

    Would not catch an error of gradients that one process has, too: `ImageGradients` does.
    """

    name: str = "image update"
    trains_tower: bool = False

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path = runs.path(scenario)

        def updated(ranks: tuple[int, int, int], keys: Mapping[str, object], sizes: Mapping[str, object]) -> list[dict]:
            if not self.trains_tower:
                return run_layout(path, *ranks, keys=READS | keys, update=with_images, **sizes)
            return run_layout(path, *ranks, keys=READS | TRAINED | keys, update=with_trained_tower, **sizes)

        alone = runs.once((self.name, path), lambda: updated((1, 1, 1), {}, {}))
        found = updated(scenario.ranks, {**scenario.common, **scenario.keys}, scenario.sizes)
        expected, _ = runs.once(("image gradients", path), partial(by_transformers, path))
        for field in ("log_probs", "ref_log_probs"):
            assert (collected(found, field) - expected).abs().max() < 2e-5
        assert_same(found, alone, path)


with_images = partial(one_update, rows_of=rows_with_features)
with_trained_tower = partial(one_update, rows_of=rows_with_patches, columns_again=trained_columns)


@dataclass(frozen=True)
class ImageFeatures:
    """Features that the ranks' towers make are transformers'; ranks hold the towers that the plan counts.

    Would not catch a tower that is too large for a device.
    """

    name: str = "image features"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path, (num_ranks, tp_size, pp_size) = runs.path(scenario), scenario.ranks
        config = run_config(path, tp_size, pp_size, **READS, **scenario.keys, **of_actor(scenario.sizes))
        ranks, expected = run_ranks(num_ranks, features_and_bytes, config), features_by_transformers(path)
        made = [rank["features"] for rank in ranks if rank["features"] is not None]
        assert len(made) == num_ranks // (tp_size * pp_size)
        assert (torch.cat(made) - expected).abs().max() < 1e-5
        planned = {stage.pp_rank: stage.phases["save"].get(TOWER, 0) for stage in plan_stages(RunModels(config))}
        for rank in ranks:
            if rank["features"] is not None:
                assert rank["held"].get(TOWER) == planned[pp_size - 1] > 0


def features_and_bytes(config: Any) -> dict[str, Any]:
    """A rank's features of its images, and the bytes that its actor holds."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    actor, where = worker.roles["actor"], worker.coordinates()
    form = image_form(actor.source.folder.settings)
    assert form is not None
    mine = torch.arange(6).tensor_split(where.dp_size)[where.dp_rank].tolist()
    patches = [patches_of(form, number) for number in mine]
    made = actor.image_features(
        Batch(
            image_grids=ragged_from_lengths(
                torch.tensor([GRIDS[number % 3] for number in mine]), torch.ones(len(mine), dtype=torch.int64)
            ),
            image_patches=ragged_from_lengths(torch.cat(patches), torch.tensor([len(one) for one in patches])),
        )
    )
    return {"features": None if made is None else made.flat("image_features"), "held": actor.memory()}


@torch.no_grad()
def features_by_transformers(path: str) -> torch.Tensor:
    """Features of the six images under transformers' model, all in one call."""
    from transformers import AutoModel

    form = image_form(ModelFolder(path).settings)
    visual = AutoModel.from_pretrained(path, dtype=torch.float32).eval().visual  # of a reward model's folder, too
    assert form is not None
    patches = torch.cat([patches_of(form, number) for number in range(6)])
    out = visual(patches, grid_thw=torch.tensor([GRIDS[number % 3] for number in range(6)]))
    return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or [])], dim=-1)
