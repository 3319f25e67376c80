"""What is refused of transformer-engine and apex before a model is built, with packages made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.megatron import OverrideTransformerConfig
from megatron_rl.errors import ConfigError
from megatron_rl.model.te_layers import megatrons_range, our_name, refuse_unusable


def install(folder: Path, name: str, version: str, *needs: str) -> None:
    """Metadata of a package as pip leaves it, without the package."""
    described = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    described.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    (described / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "transformer-engine is not installed"),
        ("2.21", f"megatron-core wants transformer-engine{megatrons_range()}, and 2.21 is installed"),
        ("2.8.0", "and 2.8.0 is installed"),
        ("2.11.0", "cannot be imported"),
    ],
)
def test_unusable_transformer_engine_is_refused(packages: Path, version: str | None, reason: str) -> None:
    """Megatron's own range. Would not catch one that is imported and whose kernels fail."""
    if version is not None:
        install(packages, "transformer-engine", version)
    with pytest.raises(ConfigError) as raised:
        refuse_unusable(OverrideTransformerConfig(transformer_impl="te_linear"))
    text = str(raised.value)
    assert reason in text and "requirements/gpu_te.txt" in text and "try: transformer_impl=local" in text
    refuse_unusable(OverrideTransformerConfig())


def test_the_web_toolkit_is_not_nvidias_apex(packages: Path) -> None:
    """`apex` 0.9.10 of the package index names pyramid among its needs; NVIDIA's needs packaging alone."""
    fused = OverrideTransformerConfig(gradient_accumulation_fusion=True)
    refuse_unusable(fused)
    install(packages, "apex", "0.9.10.dev0", "cryptacular", "velruse>=1.0.3", "pyramid>1.1.2", "pyramid_mailer")
    with pytest.raises(ConfigError, match=r"apex 0\.9\.10\.dev0 of the package index.*pip uninstall apex"):
        refuse_unusable(fused)
    refuse_unusable(OverrideTransformerConfig())


def test_nvidias_apex_is_taken(packages: Path) -> None:
    """It has the same name; what it needs tells them apart."""
    install(packages, "apex", "0.1", "packaging>20.6")
    refuse_unusable(OverrideTransformerConfig(gradient_accumulation_fusion=True))


def test_names_are_ours_whoever_computes() -> None:
    """By hand. That they are transformer-engine's is tested with its own Python (test_te_contract.py)."""
    layer = "decoder.layers.3."
    assert our_name(f"{layer}self_attention.linear_qkv.layer_norm_weight") == f"{layer}input_layernorm.weight"
    assert our_name(f"{layer}mlp.linear_fc1.layer_norm_weight") == f"{layer}pre_mlp_layernorm.weight"
    for same in (f"{layer}self_attention.linear_qkv.weight", "decoder.final_layernorm.weight"):
        assert our_name(same) == same
