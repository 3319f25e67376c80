"""What layers compute in functions of their own: the gate and the rotary embedding."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from megatron_rl.model.attention import RotaryTurn
from megatron_rl.model.mlp import SiluGate
from megatron_rl.model.norm import RMSNorm
from megatron_rl.model.segments import Segments, turns_of


def test_gate_by_its_formula():
    """Output and gradient in float64 within 1e-12. Would not catch what else is kept for backward."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 10, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64)
    gate, up = x.chunk(2, -1)
    expected, ours = F.silu(gate) * up, SiluGate.apply(x)
    assert torch.allclose(ours, expected, atol=1e-12)
    found, wanted = (torch.autograd.grad((out * upstream).sum(), x)[0] for out in (ours, expected))
    assert torch.allclose(found, wanted, atol=1e-12)


def test_angles_of_packed_rows_have_few_lengths():
    """Megatron keeps the last 32 tables of angles. Forty longest segments have seven of them; a padded row has its own
    length. Would not catch a table that is made anew for another reason.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_rl.model.gpt import num_angles

    config = SimpleNamespace(sequence_parallel=False, tensor_model_parallel_size=1, context_parallel_size=1)
    rope = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
    longest = num_angles(rope.get_rotary_seq_len)
    lengths = [1 + 101 * number for number in range(40)]
    found = [longest(None, None, None, config, SimpleNamespace(max_seqlen_q=one, max_seqlen_kv=one)) for one in lengths]
    assert all(number >= one for number, one in zip(found, lengths, strict=True))
    assert sorted(set(found)) == [64, 128, 256, 512, 1024, 2048, 4096]
    assert longest(None, None, torch.empty(37, 1, 4), config, None) == 37


def test_norm_by_its_formula():
    """Output and gradients of float32 on a CPU beside torch's own in float64, 1e-5. Would not catch other dtypes."""
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False), 16, 1e-2)
    x, upstream, weight = (torch.randn(*shape, generator=generator) for shape in ((3, 2, 16), (3, 2, 16), (16,)))
    with torch.no_grad():
        norm.weight.copy_(weight)
    x.requires_grad_()
    out = norm(x)
    assert "CpuNorm" in str(out.grad_fn)
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = F.rms_norm(leaves[0], (16,), leaves[1], 1e-2)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad((out * upstream).sum(), (x, norm.weight))
    for found, wanted in zip(ours, torch.autograd.grad((expected * upstream).sum(), leaves), strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_turn_by_quarter_and_half():
    """(1, 2) of the pairs (i, i + D / 2) turned by 90 and 180 degrees. Would not catch angles of other tokens."""
    angles = torch.tensor([[math.pi / 2], [math.pi]], dtype=torch.float64)[:, None, None]
    x = torch.tensor([1.0, 2.0], dtype=torch.float64).expand(2, 1, 3, 2)
    expected = torch.tensor([[-2.0, 1.0], [-1.0, -2.0]], dtype=torch.float64)[:, None, None].expand(2, 1, 3, 2)
    assert torch.allclose(RotaryTurn.apply(x, angles.cos(), angles.sin()), expected, atol=1e-12)


def test_turn_of_a_view_and_its_gradient():
    """Of columns of a wider tensor: numerical derivatives. Would not catch the wrong direction."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(4, 2, 20, generator=generator, dtype=torch.float64).requires_grad_()
    angles = torch.randn(4, 1, 1, 3, generator=generator, dtype=torch.float64)

    def turn(mixed):
        return RotaryTurn.apply(mixed[..., :12].reshape(4, 2, 2, 6), angles.cos(), angles.sin())

    assert torch.autograd.gradcheck(turn, wide)


def test_angles_of_a_row_with_a_prefix():
    """Every token's own position, made once. Would not catch angles of another model."""
    segments = Segments.of([3, 1], torch.device("cpu"), [(0, 0), (0, 2)])
    angles = torch.arange(5.0)[:, None, None, None].expand(5, 1, 1, 4)
    cosine, sine = turns_of(angles, segments)
    assert cosine.shape == (4, 1, 1, 2) and turns_of(angles, segments)[0] is cosine
    assert torch.equal(sine[:, 0, 0, 1], torch.tensor([0.0, 1.0, 2.0, 2.0]).sin())
