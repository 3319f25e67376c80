"""What goes in is what transformers has, and what comes out is what went in, or the trainer's own.

Every layout is compared with transformers, so a layout of several axes proves each of them: the argument is that of
`updates.py`, for which it does not matter what a family's parts are, but for how its tensors are cut, which is the
family's own and is what may be wrong here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from layout_keys import of_actor
from ranks import run_ranks
from rollout_checks import GREEDY, hugging_face_greedy, round_trip, tokens
from safetensors.torch import load_file
from scenarios import Runs, Scenario
from tiny_models import random_batch, run_config

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.columns import ACTOR_UPDATE, SCORING
from megatron_rl.controller.report import hf_sampled_logits, refuse_unreadable
from megatron_rl.planning.folder_checks import read_model_folder

NUM_ROWS = 7
MAX_SHARD_BYTES = 400_000
"""About a third of a tiny model, and less than a pipeline stage."""


@dataclass(frozen=True)
class InAndOut:
    """Of an untouched model: logits within 2e-5 of transformers', its greedy tokens, and an export of the same bytes.

    Would not catch what only long rows or an update show.
    """

    name: str = "in and out"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path, (num_ranks, tp_size, pp_size) = runs.path(scenario), scenario.ranks
        greedy, logits = runs.once(("transformers", path), partial(by_transformers, path))
        keys = {"actor_rollout_ref__rollout__tensor_model_parallel_size": tp_size, **of_actor(scenario.sizes)}
        ranks = run_ranks(num_ranks, in_and_out, run_config(path, tp_size, pp_size, **keys), folder)
        assert all(rank["greedy"] == greedy for rank in ranks)
        scored = [rank for rank in ranks if rank["logits"] is not None]
        assert len(scored) == num_ranks // pp_size
        for rank in scored:
            wanted = rows_of(logits, rank["dp_rank"], num_ranks // (tp_size * pp_size))
            assert (rank["logits"] - wanted).abs().max() < 2e-5
        assert_same_folder(folder, Path(path))


def by_transformers(path: str) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy answers and logits of a folder."""
    return hugging_face_greedy(path), hf_sampled_logits(Path(path), random_batch(NUM_ROWS).read_by(SCORING))


def in_and_out(config, exported: Path) -> dict:
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


def rows_of(logits: torch.Tensor, dp_rank: int, dp_size: int) -> torch.Tensor:
    """The part of the reference's logits that belongs to the rows of a data-parallel rank."""
    by_row = logits.split(random_batch(NUM_ROWS).num_sampled.tolist())
    return torch.cat(by_row[dp_rank::dp_size])


def assert_same_folder(exported: Path, original: Path) -> None:
    """The same tensors to the last bit, in several files, in the dtype that config.json says; a run starts from it."""
    assert read_model_folder("model", ModelFolder(exported))[1] == []
    files = sorted(file.name for file in exported.glob("*.safetensors"))
    weight_map = json.loads((exported / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(files) > 2 and set(weight_map.values()) == set(files)
    found = {}
    for file in files:
        tensors = load_file(exported / file)
        assert set(tensors) == {name for name, where in weight_map.items() if where == file}
        found |= tensors
    assert_same_tensors(found, original)
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float32"


def assert_same_tensors(found: dict[str, torch.Tensor], original: Path) -> None:
    """Names and bits are those of the folder's only file."""
    before = load_file(original / "model.safetensors")
    assert found.keys() == before.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, found[name])] == []


@dataclass(frozen=True)
class Exported:
    """An untouched model comes out as it went in, a trained one with the trainer's logits within 1e-4, in one file.

    Would not catch a wrong tokenizer, of which there is none.
    """

    name: str = "export"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path, (num_ranks, *sizes) = runs.path(scenario), scenario.ranks
        config = run_config(path, *sizes, **of_actor(scenario.sizes))
        results = run_ranks(num_ranks, export_around_an_update, config, folder)
        assert_same_tensors(load_file(folder / "untouched/model.safetensors"), Path(path))
        assert not list(folder.glob("*/*.index.json")), "a small model is one file"
        trainer_logits = next(logits for logits in results if logits is not None)
        rows = random_batch(NUM_ROWS).read_by(SCORING)
        assert (hf_sampled_logits(folder / "trained", rows) - trainer_logits).abs().max() < 1e-4
        assert (hf_sampled_logits(Path(path), rows) - trainer_logits).abs().max() > 1e-4
        assert not list(folder.glob("*.unfinished"))
        refuse_unreadable(folder / "trained")


def export_around_an_update(config, folder: Path) -> torch.Tensor | None:
    """Export untouched, train one step, export again; the trainer's logits at the end."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.roles["actor"].export_hf(folder / "untouched")
    experience = random_batch(NUM_ROWS)
    experience.add(old_log_probs=experience["advantages"])
    worker.roles["actor"].update(experience.read_by(ACTOR_UPDATE))
    worker.roles["actor"].export_hf(folder / "trained")
    return worker.roles["actor"].sampled_logits(experience.read_by(SCORING))
