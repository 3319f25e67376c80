"""What the tests of the head share."""

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def tp_group(tmp_path_factory):
    """A tensor-parallel group of one rank, in this process."""
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
