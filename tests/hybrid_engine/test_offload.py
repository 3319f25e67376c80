"""Memory that leaves and comes back under views that stay."""

import torch

from megatron_rl.hybrid_engine.offload import HostCopy, Zeros


def test_content_comes_back_bit_for_bit_under_the_same_views():
    """Two views of one storage and another tensor. Would not catch a device whose memory is not freed."""
    flat, other = torch.randn(100), torch.randint(0, 99, (7,))
    views = [flat[10:30].view(4, 5), flat[30:], other]
    before = [view.clone() for view in views]
    resting = HostCopy(lambda: views)
    for _ in range(3):
        resting.leave()
        assert [view.untyped_storage().nbytes() for view in views] == [0, 0, 0]
        resting.come_back()
        assert all(map(torch.equal, views, before))
        resting.come_back()
    flat.add_(1.0)
    assert torch.equal(views[0], before[0] + 1.0)


def test_tensors_are_asked_for_when_leaving():
    """State that is made later leaves too. Would not catch state that is replaced while it is away."""
    state: list[torch.Tensor] = []
    resting = HostCopy(lambda: state)
    resting.leave()
    resting.come_back()
    state.append(torch.ones(3))
    resting.leave()
    assert state[0].untyped_storage().nbytes() == 0
    resting.come_back()
    assert state[0].tolist() == [1.0, 1.0, 1.0]


def test_a_failure_while_leaving_loses_nothing():
    """What has left comes back, what has not stays. Would not catch a host that has no memory for it."""

    def tensors():
        yield first
        raise MemoryError

    first = torch.arange(4.0)
    resting = HostCopy(tensors)
    try:
        resting.leave()
    except MemoryError:
        resting.come_back()
    assert first.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_gradients_come_back_as_zeros():
    """Freed meanwhile, zero afterwards, untouched where they never left. Would not catch a wrong size."""
    gradients = torch.randn(50)
    view = gradients[5:15]
    resting = Zeros([gradients, view])
    resting.come_back()
    assert view.abs().sum() > 0
    resting.leave()
    assert gradients.untyped_storage().nbytes() == 0
    resting.come_back()
    assert gradients.shape == (50,) and not gradients.any() and not view.any()
