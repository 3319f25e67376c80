"""Updates of sft, reward models and preferences on rows with images, as a plain loop of transformers on the pixels."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from image_observations import GRIDS, IN_ROWS, READS, features_by_transformers, image_rows, images_of, patches_of
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from scenarios import Runs, Scenario
from task_cases import NAMES, PlainLoop, assert_equals_plain, one_update, task_config
from task_observations import Task, in_roles
from torch.nn.functional import logsigmoid
from vision_folders import save_qwen3_vl_folder

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.tasks import REWARD, SFT
from megatron_rl.data.reading import Example, Ranking, token_batch
from megatron_rl.data.row_problems import RowPlace
from megatron_rl.images import ImagePiece, digest_of_numbers
from megatron_rl.model.families import ImageForm, image_form
from megatron_rl.records import Batch, ragged_from_lengths
from megatron_rl.remote_columns import ColumnPiece, RemoteColumn
from megatron_rl.tasks.training_records import preference_batch, reward_batch

BETA, HERE = 0.1, RowPlace("file.jsonl", 0)


def save_qwen3_vl_reward_model(folder: Path, **changes) -> str:
    """A Qwen3-VL with one score in place of the vocabulary's head."""
    path = save_qwen3_vl_folder(folder, **changes)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    width = tensors["model.language_model.embed_tokens.weight"].shape[1]
    tensors["score.weight"] = torch.randn(1, width, generator=torch.Generator().manual_seed(9))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3VLForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return path


def form_of(path: str) -> ImageForm:
    form = image_form(ModelFolder(path).settings)
    assert form is not None
    return form


def examples(form: ImageForm) -> list[Example]:
    """The rows of `image_rows`, whose responses count."""
    rows, found = image_rows(form), []
    grids = rows["image_grids"].unbind()
    for row, (ids, sampled, pieces) in enumerate(
        zip(*(rows[name].unbind() for name in ("input_ids", "sampled", "image_pieces")), strict=True)
    ):
        shown = tuple(
            ImagePiece(first, digest_of_numbers(low, high), tuple(grid), size)
            for (first, size, low, high), grid in zip(pieces.tolist(), grids[row].tolist(), strict=True)
        )
        found.append(Example(ids, sampled, HERE, int((~sampled).sum()), shown))
    return found


def batch_of(kind: str, path: str) -> Batch:
    """Examples, or pairs of rows one after the other, which show other images, with all columns."""
    rows = examples(form_of(path))
    pairs = [Ranking((rows[number], rows[number + 1]), (0.25,), HERE) for number in range(0, 8, 2)]
    batch = token_batch(rows) if kind == SFT else reward_batch(pairs) if kind == REWARD else preference_batch(pairs)
    shown_by = ((one.images, images_of(row)) for row, one in enumerate(rows))
    numbers = {piece.digest: number for both in shown_by for piece, number in zip(*both, strict=True)}
    sizes = [math.prod(GRIDS[number % 3]) // form_of(path).merge ** 2 for number in range(6)]
    features = dict(enumerate(features_by_transformers(path).split(sizes)))
    shown = batch.objects("images")
    counts = torch.tensor([len(pieces) for pieces in shown])
    flat = [piece for pieces in shown for piece in pieces]
    held = [[ColumnPiece.whole(features[numbers[piece.digest]]) for piece in pieces] for pieces in shown]
    batch.add(
        image_pieces=ragged_from_lengths(torch.tensor([piece.numbers for piece in flat]), counts),
        image_grids=ragged_from_lengths(torch.tensor([piece.grid for piece in flat]), counts),
        image_features=RemoteColumn.of_pieces(held),
    )
    return batch.without("images")


@dataclass(frozen=True)
class ImageTask(Task):
    """What is learned from rows with images."""

    def run(self, path: str, ranks: tuple[int, int, int], keys: Mapping[str, object]) -> list[dict]:
        num_ranks, tp_size, pp_size = ranks
        keys = {**READS, **in_roles("ppo_micro_batch_size_per_gpu", 4 if self.kind == SFT else 2), **keys}
        config = task_config(path, self.kind, tp_size, pp_size, **self.keys(path), **keys)
        batch = batch_of(self.kind, path)
        return run_ranks(num_ranks, one_update, config, batch, *(() if self.kind == SFT else (len(batch),)))


class ImageLoop(PlainLoop):
    """The plain loop on rows with images; the tower is frozen."""

    def __init__(self, path: str, with_score: bool) -> None:
        from transformers import AutoModel

        from megatron_rl.controller.report import hf_model

        self.path = path
        if with_score:
            trunk = AutoModel.from_pretrained(path, dtype=torch.float32)
            score = torch.nn.Linear(trunk.config.get_text_config().hidden_size, 1, bias=False)
            score.weight.data = load_file(Path(path, "model.safetensors"))["score.weight"]
            self.model = torch.nn.ModuleDict({"model": trunk, "score": score})
            trunk.visual.requires_grad_(False)
        else:
            self.model = hf_model(path)
            self.model.model.visual.requires_grad_(False)

    def given(self, row: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arguments of transformers' models for a row."""
        numbers, form = images_of(row), form_of(self.path)
        if not numbers:
            return {"input_ids": ids[None]}
        grids = image_rows(form)["image_grids"].unbind()[row]
        return {
            "input_ids": ids[None],
            "pixel_values": torch.cat([patches_of(form, number) for number in numbers]),
            "image_grid_thw": grids,
            "mm_token_type_ids": (ids == form.token).int()[None],
        }

    def response(self, row: int) -> torch.Tensor:
        """Log-probs of a row's response."""
        ids, length = self._row(row)
        logits = self.model(**self.given(row, ids), use_cache=False).logits[0, -length - 1 : -1]
        return logits.log_softmax(-1).gather(1, ids[-length:, None])[:, 0]

    def score(self, row: int) -> torch.Tensor:
        """The score at a row's last token."""
        ids, _ = self._row(row)
        states = self.model["model"](**self.given(row, ids), use_cache=False).last_hidden_state
        return self.model["score"](states[0, -1])

    def _row(self, row: int) -> tuple[torch.Tensor, int]:
        rows = image_rows(form_of(self.path))
        return rows["input_ids"].unbind()[row], int(rows.num_sampled[row])


def plain_loss(plain: ImageLoop, kind: str) -> torch.Tensor:
    """Mean cross-entropy; or of pairs that of their order, by scores with margins or by log-probs, 0 the reference."""
    if kind == SFT:
        found = torch.cat([plain.response(row) for row in range(len(IN_ROWS))])
        return -found.mean()
    if kind == REWARD:
        pairs = [plain.score(row) - plain.score(row + 1) - 0.25 for row in range(0, 8, 2)]
    else:
        pairs = [BETA * (plain.response(row).sum() - plain.response(row + 1).sum()) for row in range(0, 8, 2)]
    return -logsigmoid(torch.stack(pairs)).mean()


@dataclass(frozen=True)
class ImagePlainStep:
    """Loss, gradient norm and new weights of one process equal those of a plain loop on pixels, within 1e-5.

    Would not catch placeholders that a file's reader counts.
    """

    task: ImageTask

    @property
    def name(self) -> str:
        return " ".join(("plain loop on images of", self.task.kind, self.task.loss)).rstrip()

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path, kind = runs.path(scenario), self.task.kind
        plain = ImageLoop(path, kind == REWARD)
        told = plain.step(plain_loss(plain, kind))
        assert_equals_plain(self.task.alone(scenario, runs), plain, told, NAMES[kind], path)
