"""Cores of transformer-engine, by folders of installed packages as pip and uv write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.te_cores import core_problem, installed_cores, installed_version
from megatron_rl.model import te_layers


@pytest.mark.parametrize(
    ("majors", "cuda", "words"),
    [
        (("13",), "13.0", ""),
        ((), "13.0", ""),
        (("13",), "", ""),
        (("12", "13"), "13.0", "cu12 and transformer-engine-cu13 are installed, and torch for CUDA 13.0 needs"),
        (("12", "13"), "", "needs one of them alone"),
        (
            ("12",),
            "13.0",
            "transformer-engine-cu12 is installed, and torch for CUDA 13.0 needs transformer-engine-cu13",
        ),
    ],
)
def test_one_core_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, majors: tuple[str, ...], cuda: str, words: str
) -> None:
    """Also in what a run with `transformer_impl` is told. Would not catch a core whose files were half replaced."""
    for name in ("transformer_engine", *(f"transformer_engine_cu{major}" for major in majors)):
        folder = tmp_path / f"{name}-2.11.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.11.0\n")
    assert installed_version([str(tmp_path)]) == "2.11.0" and installed_version([str(tmp_path / "none")]) == ""
    cores = installed_cores([str(tmp_path)])
    assert cores == majors
    problem = core_problem(cores, cuda)
    assert (words in problem and "pip uninstall" in problem) if words else problem == ""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("torch.version.cuda", cuda or None)
    assert te_layers.te_problem() == problem or (not problem and "cannot be imported" in te_layers.te_problem())
