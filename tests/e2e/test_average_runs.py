"""`megatron-rl average` of the checkpoints that runs leave, in other layouts, beside what `export` makes of each."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import REPOSITORY
from forked_run import ForkedRun
from safetensors.torch import load_file
from short_runs import ONE, TP2, WITHOUT_RAY
from stage_files import keys_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600), pytest.mark.exhaustive]


def told(folder: Path, *arguments: str | Path, code: int = 0) -> str:
    """What the command says; it must end with this code."""
    said = folder / "said.txt"
    assert ForkedRun([*map(str, arguments)], REPOSITORY, {"COLUMNS": "200"}, said).wait() == code, said.read_text()
    return said.read_text()


def test_checkpoints_of_two_layouts(command_line, files: Path, tmp_path: Path) -> None:
    """Steps 2 and 4 of a run on two ranks of TP, and step 2 of one on one rank with another seed: the average is that
    of the three exports, and a run starts from it. A role that was not trained is refused. Would not catch a checkpoint
    that export misreads, too."""
    keys = ("trainer.total_training_steps=4", "trainer.export_hf=false", "trainer.save_best=false")
    short = (*keys_of(files, "sft"), *keys)
    two = command_line(*short, *TP2, WITHOUT_RAY, stage="sft")
    assert two.wait() == 0, two.text()
    one = command_line(*short, *ONE, "--local", "trainer.seed=3", "trainer.total_training_steps=2", stage="sft")
    assert one.wait() == 0, one.text()
    folders = [two.run / "global_step_2", two.run / "global_step_4", one.run / "global_step_2"]
    for number, folder in enumerate(folders):
        told(tmp_path, "export", "--checkpoint", folder, "--target", tmp_path / f"export_{number}")
    said = told(
        tmp_path, "average", "--checkpoints", two.run, folders[2], "--ema", "0.5", "--target", tmp_path / "mean"
    )
    assert f"0.2500 of {folders[0]}" in said and f"0.5000 of {folders[2]}" in said
    parts = [load_file(tmp_path / f"export_{number}" / "model.safetensors") for number in range(3)]
    found = load_file(tmp_path / "mean" / "model.safetensors")
    assert found.keys() == parts[0].keys()
    for name, tensor in found.items():
        expected = sum(share * part[name].double() for share, part in zip((0.25, 0.25, 0.5), parts, strict=True))
        assert (tensor - expected.float()).abs().max() <= 1e-7 * expected.abs().max(), name
    again = command_line(*short, *ONE, "--local", f"actor_rollout_ref.model.path={tmp_path / 'mean'}", stage="sft")
    assert again.wait() == 0, again.text()
    other = ("average", "--checkpoints", folders[0], folders[1], "--target", tmp_path / "other", "--role", "critic")
    assert "has none, as its run trained none; try: --role actor" in told(tmp_path, *other, code=2)
