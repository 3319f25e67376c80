"""Memory that leaves and comes back under views that stay."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.hybrid_engine.offload import (
    LARGEST_PIECE,
    SMALLEST_PIECE,
    HostBuffer,
    HostCopy,
    Zeros,
    piece_sizes,
)


def test_content_comes_back_bit_for_bit_under_the_same_views():
    """Two views of one storage and another tensor. Would not catch a device whose memory is not freed."""
    flat, other = torch.randn(100), torch.randint(0, 99, (7,))
    views = [flat[10:30].view(4, 5), flat[30:], other]
    before = [view.clone() for view in views]
    offloaded = HostCopy(lambda: views)
    for _ in range(3):
        offloaded.offload()
        assert [view.untyped_storage().nbytes() for view in views] == [0, 0, 0]
        offloaded.reload()
        assert all(map(torch.equal, views, before))
        offloaded.reload()
    flat.add_(1.0)
    assert torch.equal(views[0], before[0] + 1.0)


def test_tensors_are_asked_for_when_leaving():
    """State that is made later leaves too. Would not catch state that is replaced while it is away."""
    state: list[torch.Tensor] = []
    offloaded = HostCopy(lambda: state)
    offloaded.offload()
    offloaded.reload()
    state.append(torch.ones(3))
    offloaded.offload()
    assert state[0].untyped_storage().nbytes() == 0
    offloaded.reload()
    assert state[0].tolist() == [1.0, 1.0, 1.0]


def test_a_failure_while_leaving_loses_nothing():
    """What has left comes back, what has not stays. Would not catch a host that has no memory for it."""

    def tensors():
        yield first
        raise MemoryError

    first = torch.arange(4.0)
    offloaded = HostCopy(tensors)
    try:
        offloaded.offload()
    except MemoryError:
        offloaded.reload()
    assert first.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_gradients_come_back_as_zeros():
    """Freed meanwhile, zero afterwards, untouched where they never left. Would not catch a wrong size."""
    gradients = torch.randn(50)
    view = gradients[5:15]
    offloaded = Zeros([gradients, view])
    offloaded.reload()
    assert view.abs().sum() > 0
    offloaded.offload()
    assert gradients.untyped_storage().nbytes() == 0
    offloaded.reload()
    assert gradients.shape == (50,) and not gradients.any() and not view.any()


@given(num_bytes=st.integers(0, 3 << 28))
def test_pieces_are_powers_of_two_and_waste_little(num_bytes):
    """Under a MiB, whatever the amount. Would not catch another rule of torch's allocator of pinned memory."""
    sizes = piece_sizes(num_bytes)
    assert num_bytes <= sum(sizes) < num_bytes + SMALLEST_PIECE
    assert all(size.bit_count() == 1 and SMALLEST_PIECE <= size <= LARGEST_PIECE for size in sizes)


def test_host_memory_is_used_again_and_grows():
    """The same pieces for the same amount, more for more. Would not catch memory that is not pinned."""
    buffer = HostBuffer(pinned=False)
    buffer.reserve(3 * SMALLEST_PIECE)
    content = torch.arange(256, dtype=torch.uint8).repeat(3 * SMALLEST_PIECE // 256)
    places = [host.data_ptr() for host, _ in buffer.parts(0, content)]
    buffer.reserve(2 * SMALLEST_PIECE)
    assert [host.data_ptr() for host, _ in buffer.parts(0, content)] == places and len(places) == 2
    buffer.reserve(4 * SMALLEST_PIECE)
    assert buffer.num_bytes == 4 * SMALLEST_PIECE
    buffer.drop()
    assert buffer.num_bytes == 0


def test_a_tensor_is_kept_in_powers_of_two():
    """As a frozen base is on a GPU's host, where one pinned allocation of 5 MiB would take 8. Would not catch memory
    that is not pinned.
    """
    buffer, content = HostBuffer(pinned=False), torch.randn(5 * SMALLEST_PIECE // 2 - 3, dtype=torch.float16)
    buffer.keep(content)
    back = torch.empty_like(content)
    buffer.give(back)
    assert torch.equal(back, content) and buffer.num_bytes == 5 * SMALLEST_PIECE
    assert [-(-len(host) // SMALLEST_PIECE) for host, _ in buffer.parts(0, content.view(torch.uint8))] == [4, 1]


@pytest.mark.parametrize(("offset", "length"), [(0, 10), (SMALLEST_PIECE, 7), (2 * SMALLEST_PIECE - 3, 9), (5, 0)])
def test_content_lies_end_to_end_over_pieces(offset, length):
    """Inside one piece, at the edge of two, and none. Would not catch two contents on the same bytes."""
    buffer = HostBuffer(pinned=False)
    buffer.reserve(3 * SMALLEST_PIECE)
    content, back = torch.randint(0, 256, (length,), dtype=torch.uint8), torch.zeros(length, dtype=torch.uint8)
    for host, part in buffer.parts(offset, content):
        host.copy_(part)
    for host, part in buffer.parts(offset, back):
        part.copy_(host)
    assert torch.equal(back, content)
    assert sum(len(host) for host, _ in buffer.parts(offset, content)) == length


def test_a_cpus_host_copy_is_not_kept():
    """It would take the memory twice. Would not catch that of a GPU, which is kept."""
    tensor = torch.randn(1000)
    offloaded = HostCopy(lambda: [tensor])
    offloaded.offload()
    assert offloaded._buffer.num_bytes == SMALLEST_PIECE
    offloaded.reload()
    assert offloaded._buffer is None or offloaded._buffer.num_bytes == 0
