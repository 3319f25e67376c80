"""Muon's arithmetic and its plan, by hand and without processes."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.parallel.muon_runs import is_muon_matrix, runs_in_bucket
from megatron_rl.parallel.sharding import LogicalTensor, Segment
from megatron_rl.roles.orthogonal import orthogonalize, scale_factor


def test_singular_values_follow_the_quintic() -> None:
    """Of 6 x 4 with known singular vectors, five steps in float32. Would not catch another polynomial that is near."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(rows, 4))[0] for rows in (6, 4))
    values = torch.tensor([4.0, 2.0, 1.0, 0.5])
    near = values / values.norm()
    for _ in range(5):
        near = 3.4445 * near - 4.7750 * near**3 + 2.0315 * near**5
    found = orthogonalize(left @ values.diag() @ right.T, 5, torch.float32)
    torch.testing.assert_close(found, left @ near.diag() @ right.T, rtol=1e-4, atol=1e-5)
    assert near.min() > 0.6 and near.max() < 1.3


@pytest.mark.parametrize(
    ("mode", "tall", "wide"), [("spectral", 3, 3), ("unit_rms_norm", 1.5, 2 / 3), ("shape_scaling", 1.5, 1)]
)
def test_factors(mode: str, tall: float, wide: float) -> None:
    """Of 9 x 4 and 4 x 9. Would not catch a mode that torch calls otherwise."""
    assert (scale_factor(9, 4, mode), scale_factor(4, 9, mode)) == pytest.approx((tall, wide))


def test_runs_of_a_bucket() -> None:
    """Elements 5 to 14 of 16 on four ranks. Would not catch that Megatron divides otherwise: test_muon.py."""
    assert runs_in_bucket(5, 14, 16, 4) == ((0, 0), (0, 3), (3, 7), (7, 9))


@pytest.mark.parametrize(
    ("name", "shape", "is_expert", "expected"),
    [
        ("decoder.layers.3.mlp.router.weight", (8, 4), False, True),
        ("decoder.layers.3.mlp.experts.w13", (8, 4, 4), True, True),
        ("decoder.layers.3.mlp.experts.bias", (8, 4), True, False),
        ("decoder.layers.3.input_layernorm.weight", (4,), False, False),
        ("embedding.word_embeddings.weight", (8, 4), False, False),
        ("output_layer.weight", (8, 4), False, False),
    ],
)
def test_matrices_of_layers(name: str, shape: tuple[int, ...], is_expert: bool, expected: bool) -> None:
    """Megatron's rule. Would not catch a family that names its layers otherwise."""
    tensor = LogicalTensor(name, (Segment(name, shape, 1),), None, is_expert)
    assert is_muon_matrix(name, tensor) is expected
