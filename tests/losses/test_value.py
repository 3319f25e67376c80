"""PPO's clipped value objective."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.losses.value import clipped_value_loss

#  value, return, loss, clipped, d loss / d value; old value 0.5, range 0.2
CASES = [
    pytest.param(1.0, 2.0, 0.845, 1.0, 0.0, id="went up too far towards a high return"),
    pytest.param(1.0, 0.0, 0.5, 0.0, 1.0, id="went up, away from a low return: full pull back"),
    pytest.param(0.0, -1.0, 0.845, 1.0, 0.0, id="went down too far towards a low return"),
    pytest.param(0.0, 1.0, 0.5, 0.0, -1.0, id="went down, away from a high return: full pull back"),
    pytest.param(0.6, 2.0, 0.98, 0.0, -1.4, id="inside the range"),
    pytest.param(0.5, 0.5, 0.0, 0.0, 0.0, id="nothing to learn"),
]


@pytest.mark.parametrize(("value", "target", "loss", "clipped", "gradient"), CASES)
def test_both_sides_of_the_range(value, target, loss, clipped, gradient):
    """Loss, clip mark and gradient by hand. Would not catch a wrong sum over tokens."""
    values = torch.tensor([value], requires_grad=True)
    found, marks = clipped_value_loss(values, torch.tensor([0.5]), torch.tensor([target]), cliprange_value=0.2)
    assert found.item() == pytest.approx(loss, abs=1e-6) and marks.item() == clipped
    assert torch.autograd.grad(found.sum(), values)[0].item() == pytest.approx(gradient, abs=1e-6)


def test_a_wide_range_is_plain_squared_error():
    """Half the square where nothing is clipped, with its gradient. Would not catch a wrong clip."""
    values = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
    loss, clipped = clipped_value_loss(values, torch.zeros(3), torch.tensor([0.0, 1.0, 3.0]), cliprange_value=1e6)
    torch.testing.assert_close(loss, torch.tensor([0.5, 4.5, 3.125]))
    assert clipped.tolist() == [0.0, 0.0, 0.0]
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [1.0, -3.0, -2.5]


@given(
    tokens=st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=12), limit=st.sampled_from([0.1, 0.5, 9.0])
)
def test_agrees_with_a_loop(tokens, limit):
    """Python floats on any number of tokens. Would not catch a wrong gradient."""
    expected = []
    for value, old, target in tokens:
        limited = min(max(value, old - limit), old + limit)
        expected.append(max((value - target) ** 2, (limited - target) ** 2) / 2)
    values, old_values, returns = torch.tensor(tokens, dtype=torch.float64).T
    found, _ = clipped_value_loss(values, old_values, returns, limit)
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
