"""Tensors that a run carries come out with the bytes that went in, whatever was trained, in whatever layout.

Why the layout cannot matter: no rank holds them. Rank 0 reads them from the folder that the role started from, and
writes them into the files that all ranks have planned. Not exercised: folders that ranks see at different paths.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from raw_tensors import raw
from resumed_training import start_saving
from safetensors.torch import load_file, save_file
from tiny_models import random_batch, run_config
from tiny_pass_through import save_deepseek_v3_with_layer_ahead, save_glm4_with_layer_ahead

from megatron_rl.checkpoint.adapter_folder import adapter_identity
from megatron_rl.checkpoint.export_saved import export_saved
from megatron_rl.checkpoint.identity import folder_identity
from megatron_rl.checkpoint.manifest import FORMAT, Manifest, model_identity, write_manifest
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.config.lora import LoraConfig
from megatron_rl.controller.lifecycle import copy_model_files
from megatron_rl.errors import ConfigError
from megatron_rl.records import RoleState

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS = 8
MAX_SHARD_BYTES = 400_000
LORA = {f"actor_rollout_ref__model__lora__{key}": value for key, value in (("rank", 4), ("alpha", 8.0))}


def train_and_export(config, folder: Path) -> None:
    """Export untouched, take one step, export again, save."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    actor = worker.roles["actor"]
    actor.export_hf(folder / "untouched", max_shard_bytes=MAX_SHARD_BYTES)
    rows = torch.arange(NUM_ROWS).tensor_split(worker.groups.grid.dp_size)[worker.groups.dp_rank]
    mine = random_batch(NUM_ROWS)[rows]
    mine.add(old_log_probs=mine["advantages"].clone())
    actor.update(mine.read_by(ACTOR_UPDATE))
    actor.export_hf(folder / "trained", max_shard_bytes=MAX_SHARD_BYTES)
    actor.export_hf(folder / "one file")
    start_saving(worker, folder / "saved").finish(wait=True)
    if worker.groups.rank == 0:
        state = dataclasses.asdict(actor.checkpoint.state)
        (folder / "saved" / "state.json").write_text(json.dumps(state))


def load_and_export(config, saved: Path, target: Path) -> None:
    """Go on in another layout, and export."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    state = RoleState(**json.loads((saved / "state.json").read_text()))
    worker.roles["actor"].checkpoint.load(saved / "actor", state)
    worker.roles["actor"].export_hf(target)


@pytest.mark.parametrize(
    ("save_model", "layout", "other", "keys"),
    [
        (save_glm4_with_layer_ahead, (2, 1, 2), (2, 2, 1), {}),
        pytest.param(save_deepseek_v3_with_layer_ahead, (4, 2, 2), (1, 1, 1), {}, marks=pytest.mark.exhaustive),
        pytest.param(save_glm4_with_layer_ahead, (2, 2, 1), (1, 1, 1), LORA, marks=pytest.mark.exhaustive),
    ],
    ids=["GLM-4.5: PP2 to TP2", "DeepSeek-V3: TP2xPP2 to one", "GLM-4.5 with adapters: TP2 to one"],
)
def test_carried_layers_come_out_of_every_export(save_model, layout, other, keys, tmp_path) -> None:
    """Live, of a checkpoint, in another layout; refused without the folder. Would not catch a tensor that no family
    names as carried, which preflight refuses.
    """
    path = Path(save_model(tmp_path / "model"))
    sizes = {"actor_rollout_ref__actor__megatron__sequence_parallel": True}
    world, tp_size, pp_size = layout
    config = run_config(str(path), tp_size, pp_size, **keys, **(sizes if tp_size > 1 else {}))
    run_ranks(world, train_and_export, config, tmp_path)
    original, untouched, trained = raw(path), raw(tmp_path / "untouched"), raw(tmp_path / "trained")
    carried = {name for name, (dtype, _) in original.items() if dtype != torch.float32} | {
        name for name in original if name.endswith("weight_scale_inv")
    }
    assert len(carried) > 20 and {original[name][0] for name in carried} > {torch.bfloat16, torch.float8_e4m3fn}
    assert untouched == original
    assert [file.name for file in (tmp_path / "one file").glob("*.safetensors")] == ["model.safetensors"]
    assert raw(tmp_path / "one file") == trained
    assert trained.keys() == original.keys()
    assert {name for name in original if trained[name] == original[name]} >= carried
    changed = {name for name in original if trained[name] != original[name]}
    assert len(changed) > 10 and not changed & carried

    saved = tmp_path / "saved"
    assert "actor/huggingface/carried.json" in copy_model_files({"actor": str(path)}, saved)
    if keys:  # whose base the manifest describes
        settings = json.loads((path / "config.json").read_text())
        base = model_identity(settings) | folder_identity(ModelFolder(path))
        adapters = adapter_identity(settings, LoraConfig(rank=4, alpha=8.0))
        write_manifest(saved, Manifest(FORMAT, 1, {"actor": base | adapters}, {}))
        export_saved(saved, "actor", tmp_path / "offline", base=path)
        assert raw(tmp_path / "offline") == trained
        return
    export_saved(saved, "actor", tmp_path / "offline")
    assert raw(tmp_path / "offline") == trained
    world, tp_size, pp_size = other
    config = run_config(str(path), tp_size, pp_size, **(sizes if tp_size > 1 else {}))
    run_ranks(world, load_and_export, config, saved, tmp_path / "again")
    assert raw(tmp_path / "again") == trained

    moved = path.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"again from the folder that the run started from, and that is missing"):
        export_saved(saved, "actor", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    export_saved(saved, "actor", tmp_path / "from base", base=moved)
    assert raw(tmp_path / "from base") == trained
    shutil.copytree(moved, tmp_path / "other")
    damaged = tmp_path / "other" / "model.safetensors"
    tensors = load_file(damaged)
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, damaged, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"does not hold them as they were; export --base FOLDER names it"):
        export_saved(saved, "actor", tmp_path / "nothing", base=tmp_path / "other")
