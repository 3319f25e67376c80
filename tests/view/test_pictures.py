"""Pictures of samples: those that a run wrote are on its page, next to the sample; no other file is."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_page_data import made_run
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.data.patch_pictures import png_of_patches
from megatron_rl.view.sample_pictures import PNG, digests_of, pictures_of

OWN, LINKED, TEXT, LARGE, ABSENT = (f"{number:032x}" for number in range(5))


@pytest.mark.parametrize("settings", [{"patch_size": 14}, {"patch_size": 16, "image_mean": [0.5] * 3}])
def test_a_picture_is_made_of_patches(settings: dict) -> None:
    """Its pixels are those of the image, whose sides need no change. Would not catch another order of frames."""
    side = 2 * settings["patch_size"]
    pixels = np.random.RandomState(0).randint(0, 256, (2 * side, 3 * side, 3)).astype(np.uint8)
    processor = Qwen2VLImageProcessorPil(**settings, size={"shortest_edge": 56, "longest_edge": 10**6})
    made = processor(images=[Image.fromarray(pixels)], return_tensors="np")
    content = png_of_patches(made["pixel_values"], tuple(made["image_grid_thw"][0].tolist()), settings)
    assert (np.asarray(Image.open(io.BytesIO(content))) == pixels).all()


def test_a_page_has_the_pictures_of_its_run_alone(tmp_path: Path) -> None:
    """Not files behind links, other formats, large files, or names of other places."""
    run = made_run(tmp_path / "run")
    folder, tables = run / "images", run / "val_generations"
    folder.mkdir()
    tables.mkdir(exist_ok=True)
    (tmp_path / "secret.png").write_bytes(PNG + b"secret")
    (folder / f"{OWN}.png").write_bytes(PNG + b"own")
    (folder / f"{LINKED}.png").symlink_to(tmp_path / "secret.png")
    (folder / f"{TEXT}.png").write_bytes(b"<script>")
    (folder / f"{LARGE}.png").write_bytes(PNG + bytes(5 << 20))
    names = [OWN, LINKED, TEXT, LARGE, ABSENT, "../../secret", 7, "x" * 32]
    (tables / "77.jsonl").write_text(json.dumps({"input": "what?", "output": "a square", "score": 1, "images": names}))
    out = tmp_path / "view.html"
    assert CliRunner().invoke(app, ["view", str(run), "--out", str(out)], catch_exceptions=False).exit_code == 0
    page = out.read_text()
    assert base64.b64encode(PNG + b"own").decode() in page
    assert base64.b64encode(PNG + b"secret").decode() not in page and "secret" not in page
    samples = [{"images": digests_of({"images": names})}]
    assert list(pictures_of(run, samples)) == [OWN] and pictures_of(run, samples, room=3) == {}
    assert digests_of({"images": names}) == names[:5] and digests_of({"images": OWN}) == digests_of({}) == []
